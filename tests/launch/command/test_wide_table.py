"""Tables are not cut to a narrow output."""

import io

from rich.console import Console
from rich.table import Table

from launch.command.wide_table import print_table


def test_a_table_keeps_its_words_where_the_output_is_narrow():
    table = Table(box=None)
    names = [f"a-long-name-{column}" for column in range(7)]
    for name in names:
        table.add_column(name)
    table.add_row(*["x"] * 7)
    out = io.StringIO()
    print_table(Console(file=out, width=40), table)
    assert out.getvalue().splitlines()[0].split() == names
