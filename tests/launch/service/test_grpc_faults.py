import grpc

from launch.service.grpc_faults import Fault


def test_a_status_is_one_printable_line_and_short_whatever_was_said():
    fault = Fault(grpc.StatusCode.INTERNAL, "rank 1\nsaid \x1b[31m" + "x" * 5000, reason="group_failed")
    assert fault.detail.startswith("rank 1\\nsaid \\x1b[31mxx")
    assert fault.detail.isprintable()
    assert len(fault.detail) < 1100
    assert fault.detail.endswith("...")
