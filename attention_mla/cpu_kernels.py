"""A block's kernels on a processor, in Numba: norms, what is appended to the cache, and decode rows' attention.

bfloat16 throughout; sums are float32. Rows may be part of something wider, so every side but the last has its stride in
bytes. Calls are made in `numba_ops`, which says there what each argument is.

Letters: T tokens here, D the normalised dim, C latent rank, P rope dim, W = C + P, H heads, R decode rows, S positions
of one block.
"""

import numpy as np
from numba import njit

from ep.cpu.calls import kernel
from ep.cpu.dots import SUMS, WIDTH, carry_on, dots, largest, pair_up
from ep.cpu.language import bits_double, claim, exp, fetch, floats, halves, longs, narrow, narrowed, widen
from ep.cpu.panels import COLUMNS, LANES
from ep.cpu.tile import tile

__all__ = ["BLOCK", "append", "attend", "norm"]

BLOCK = 64
"""S: positions whose scores exist at once. Their latents stay in a core's cache until they are multiplied again."""
MOST_HEADS = 8
LINE = 64
"""Bytes of a cache line, at which vectors are read best."""

ONE, ZERO, NOTHING = np.float32(1.0), np.float32(0.0), np.float32(-np.inf)


@njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _norm_row(x, weight, size, eps, out):
    """`norm.rms_norm` of one row; all but the last two numbers and `out` are addresses."""
    x, weight, out = halves(x), halves(weight), halves(out)
    squares = ZERO
    for d in range(size):
        value = widen(x[d])
        squares += value * value
    scale = ONE / np.sqrt(squares / np.float32(size) + np.float32(eps))
    for d in range(size):
        out[d] = narrow(narrowed(widen(x[d]) * scale) * widen(weight[d]))


@kernel()
def norm(args):
    """Rows plus updates, and the norm of that. Without updates (address 0) no sums are written."""
    x, x_row, update, update_row, sums, out = args[2], args[3], args[4], args[5], args[6], args[7]
    weight, num_rows, size, some, eps = args[8], args[9], args[10], args[11], bits_double(args[12])
    while True:
        piece = claim(args)
        if piece >= args[1]:
            return
        for row in range(piece * some, min((piece + 1) * some, num_rows)):
            given = x + row * x_row
            if update:
                one, other, both = halves(given), halves(update + row * update_row), halves(sums + row * size * 2)
                for d in range(size):
                    both[d] = narrow(widen(one[d]) + widen(other[d]))
                given = sums + row * size * 2
            _norm_row(given, weight, size, eps, out + row * size * 2)


@njit(error_model="numpy")
def _turn(x, turns, num_pairs, interleaved, out):
    """`rope.rotate` of P dims by as many float32 (cos, sin one after the other)."""
    x, turns, out = halves(x), floats(turns), halves(out)
    step, apart = (2, 1) if interleaved else (1, num_pairs)
    for pair in range(num_pairs):
        first, second = widen(x[pair * step]), widen(x[pair * step + apart])
        cos, sin = turns[2 * pair], turns[2 * pair + 1]
        out[pair * step] = narrow(first * cos - second * sin)
        out[pair * step + apart] = narrow(first * sin + second * cos)


@kernel()
def append(args):
    """Tokens' latents, normed, and their rope keys, turned, into the cache's rows; queries' rope parts, turned, into
    `out`. The last pieces clear places, none of which is written.

    A place of -1 is the last row, which several tokens may write at once: it is never read.
    """
    latents, latent_row, ropes, rope_row, weight = args[2], args[3], args[4], args[5], args[6]
    turns, places, cache, num_places, rank, rope_dim = args[7], args[8], args[9], args[10], args[11], args[12]
    queries, query_row, query_head, num_heads, out = args[13], args[14], args[15], args[16], args[17]
    num_tokens, some, cleared, num_cleared = args[18], args[19], args[20], args[21]
    interleaved, eps = args[22], bits_double(args[23])
    width, pairs = rank + rope_dim, rope_dim // 2
    token_pieces = (num_tokens + some - 1) // some
    while True:
        piece = claim(args)
        if piece >= args[1]:
            return
        if piece >= token_pieces:
            first = (piece - token_pieces) * BLOCK
            for number in range(first, min(first + BLOCK, num_cleared)):
                row = halves(cache + longs(cleared)[number] * width * 2)
                for w in range(width):
                    row[w] = np.uint16(0)
            continue
        for token in range(piece * some, min((piece + 1) * some, num_tokens)):
            place, turn = longs(places)[token], turns + token * pairs * 8
            row = cache + (place if place >= 0 else num_places + place) * width * 2
            _norm_row(latents + token * latent_row, weight, rank, eps, row)
            _turn(ropes + token * rope_row, turn, pairs, interleaved, row + rank * 2)
            for head in range(num_heads):
                source = queries + token * query_row + head * query_head
                _turn(source, turn, pairs, interleaved, out + (token * num_heads + head) * rope_dim * 2)


@njit(error_model="numpy")
def _copy(source, target, count):
    given, to = halves(source), halves(target)
    for number in range(count):
        to[number] = given[number]


@njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _shares(scores, count, scale, before, shares):
    """Scores become shares exp(score - largest so far), in bf16. Returns the largest so far and the shares' sum;
    `before` is the largest of earlier blocks. Up to the end of a vector shares follow that are next to nothing."""
    score, share, vectors = floats(scores), halves(shares), (count + LANES - 1) // LANES
    for s in range(count, vectors * LANES):
        score[s] = NOTHING
    most = max(before, largest(scores, vectors) * scale)
    total = ZERO
    for s in range(vectors * LANES):
        rounded = narrow(exp(score[s] * scale - most))
        share[s] = rounded
        total += widen(rounded)
    return most, total


@njit(error_model="numpy")
def _find_block(begin, count, pages, page_size, cache, width, wide, copy, zeros, addresses):
    """Where the rows of `count` positions from `begin` on lie; then zeros. Rows that end within a vector are copied to
    where zeros follow them."""
    found, number, offset = longs(addresses), begin // page_size, begin % page_size
    for s in range(count):
        found[s] = cache + (longs(pages)[number] * page_size + offset) * width * 2
        if wide != width:
            _copy(found[s], copy + s * wide * 2, width)
            found[s] = copy + s * wide * 2
        offset += 1
        if offset == page_size:
            number, offset = number + 1, 0
    for s in range(count, count + SUMS):
        found[s] = zeros


@njit(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _add_means(heads, share_rows, addresses, num_pairs, share_of, panels, panel, sums, means, following, num_following):
    """Means times `share_of`, plus a block's latents times their shares. Meanwhile the rows of the block that follows
    are brought near."""
    for number in range(panels):
        for s in range(num_following * number // panels, num_following * (number + 1) // panels):
            for line in range(0, panels * COLUMNS * 2 + 2 * LINE, LINE):
                fetch(longs(following)[s] + line)
        column = number * COLUMNS * 2
        for pair in range(num_pairs):
            one, other = longs(addresses)[2 * pair], longs(addresses)[2 * pair + 1]
            pair_up(one + column, other + column, panel + pair * COLUMNS * 4)
        tile(heads, share_rows, panel, num_pairs, sums)
        for head in range(heads):
            carry_on(means + (head * panels + number) * COLUMNS * 4, share_of[head], sums + head * COLUMNS * 4)


@njit(error_model="numpy")
def _write_scaled(values, scale, count, out):
    """In bf16. Not with fastmath, which would divide by what scale is the inverse of."""
    value, to = floats(values), halves(out)
    for number in range(count):
        to[number] = narrow(value[number] * scale)


@kernel()
def attend(args):
    """Each decode row's heads over its context: the mean of its latents, weighted by softmax.

    Blocks of positions are merged in ascending order (Milakov and Gimelshein, Online normalizer calculation for
    softmax, https://arxiv.org/abs/1805.02867). A piece of work is a few heads of a row. What a head gets depends on
    nothing but its own query and context: neither on the other heads of a piece nor on the batch.
    """
    queries, ropes, out, tokens, num_groups, group_heads = args[2], args[3], args[4], args[5], args[6], args[7]
    positions, pages, num_pages, page_size = args[8], args[9], args[10], args[11]
    cache, rank, rope_dim, num_heads, scale = args[12], args[13], args[14], args[15], np.float32(bits_double(args[16]))
    width, panels = rank + rope_dim, (rank + COLUMNS - 1) // COLUMNS
    wide = (width + WIDTH - 1) // WIDTH * WIDTH
    num_copies = 1 if wide == width else 1 + 2 * BLOCK
    addresses, share_rows = np.empty(2 * (BLOCK + SUMS), np.int64), np.empty(MOST_HEADS, np.int64)
    most, total, share_of = (
        np.empty(MOST_HEADS, np.float32),
        np.empty(MOST_HEADS, np.float32),
        np.empty(MOST_HEADS, np.float32),
    )
    floats_needed = MOST_HEADS * (BLOCK + COLUMNS + panels * COLUMNS)
    halves_needed = (MOST_HEADS + num_copies) * wide + MOST_HEADS * BLOCK + BLOCK * COLUMNS
    memory = np.zeros(4 * floats_needed + 2 * halves_needed + LINE, np.uint8)
    scores = memory.ctypes.data + (-memory.ctypes.data) % LINE
    sums = scores + MOST_HEADS * BLOCK * 4
    means = sums + MOST_HEADS * COLUMNS * 4
    query = means + MOST_HEADS * panels * COLUMNS * 4
    zeros = query + MOST_HEADS * wide * 2
    copies = zeros + wide * 2
    shares = zeros + num_copies * wide * 2
    panel = shares + MOST_HEADS * BLOCK * 2
    found = addresses.ctypes.data
    for head in range(MOST_HEADS):
        share_rows[head] = shares + head * BLOCK * 2
    asked = 8 if group_heads > 4 else 4
    while True:
        piece = claim(args)
        if piece >= args[1]:
            break
        row, first_head = piece // num_groups, piece % num_groups * group_heads
        heads, first = min(group_heads, num_heads - first_head), longs(tokens)[row] * num_heads + first_head
        for head in range(heads):
            _copy(queries + (first + head) * rank * 2, query + head * wide * 2, rank)
            _copy(ropes + (first + head) * rope_dim * 2, query + (head * wide + rank) * 2, rope_dim)
            most[head], total[head] = NOTHING, ZERO
        for number in range(heads * panels * COLUMNS):
            floats(means)[number] = ZERO
        context, own_pages, later = longs(positions)[row] + 1, pages + row * num_pages * 8, 0
        count = min(BLOCK, context)
        _find_block(0, count, own_pages, page_size, cache, width, wide, copies, zeros, found)
        for begin in range(0, context, BLOCK):
            here, later = found + later * (BLOCK + SUMS) * 8, 1 - later
            following = found + later * (BLOCK + SUMS) * 8
            num_following, copy = min(BLOCK, context - begin - count), copies + later * BLOCK * wide * 2
            _find_block(begin + BLOCK, num_following, own_pages, page_size, cache, width, wide, copy, zeros, following)
            for s in range(0, count, SUMS // asked):
                dots(asked, query, wide * 2, here + s * 8, wide // WIDTH, scores + s * 4, BLOCK * 4)
            for head in range(heads):
                before = most[head]
                most[head], added = _shares(scores + head * BLOCK * 4, count, scale, before, share_rows[head])
                share_of[head] = exp(before - most[head])
                total[head] = total[head] * share_of[head] + added
            pairs, rows = (count + 1) // 2, share_rows.ctypes.data
            _add_means(heads, rows, here, pairs, share_of, panels, panel, sums, means, following, num_following)
            count = num_following
        for head in range(heads):
            mean = means + head * panels * COLUMNS * 4
            _write_scaled(mean, ONE / total[head], rank, out + (first + head) * rank * 2)
    memory[0], addresses[0] = 0, 0  # they are freed after their last use, and an address is none
