"""Numbers that were tuned by measuring, on 2 cores of an AMD EPYC (32 MiB of L3) unless a comment says otherwise.

None of them changes a result. Each has its measurement and a command that repeats it: change the number, and run the
command before and after, in turns. None was tuned on a GPU.
"""


def chunk(size: int, numel: int, *, on_gpu: bool) -> int:
    """Return the number of elements that a pass takes at a time: `size` on a CPU, for its cache; all `numel` on a GPU,
    where launches cost more than a cache saves.
    """
    return numel if on_gpu else min(size, numel)


# Elements of the sum over ranks that are added at a time. The FP32 accumulator (1 MiB) stays in cache while the ranks'
# parts stream through: 0.5 ms, where `torch.sum(dim=0, dtype=float32)` took 2.2. Again: `megamix bench wire` at
# bbfe85b7.
SUM_CHUNK = 1 << 18

# Elements per pass of the statistics without a compiler. Their FP32 copy (2 MiB) stays in cache, and there are few
# passes, each of which takes some microseconds to begin. 32, 64, 128, 256, 512 Ki took 0.83, 0.65, 0.57, 0.47, 0.39 ns
# per gradient. Again: `megamix bench update`, "statistics, no compiler".
STATS_CHUNK = 1 << 19

# Elements that are summed, in FP32 from half parts, before their statistics are taken. Their 8 MiB are still in cache
# then. With smaller chunks the calls of compiled statistics (0.02 to 0.3 ms each before they start) cost more than the
# saved memory traffic: 0.81 ns per element of a shard of 1.5 M, 1.09 in chunks of 1 MiB. A multiple of ROW. Again:
# `megamix bench wire` at bbfe85b7, `half_fp32_sum`.
SUMMED_CHUNK = 1 << 21

# Elements per chunk of an update without a compiler. A chunk's FP32 gradient (2 MiB) stays in cache between the
# multiplication and the library's kernel, and its master until the cast. 128, 256, 512 Ki, 1, 2 Mi took 1.07, 0.94,
# 0.90, 0.90, 1.00 ns per parameter of 64 M, while other programs used the cache, too. A multiple of ROW, so that no
# chunk ends in the kernel's scalar tail, which rounds differently. Again: `megamix bench update`, "update, no
# compiler".
UPDATE_CHUNK = 1 << 19

# Elements that an optimizer's equation takes at a time if nothing is compiled and the library has no kernel. Its
# temporaries stay in cache, and are small enough for malloc to keep them. In chunks of 1 Mi the velocity form of NAG
# took 10 ns per parameter, in these 2.6. Again: `megamix bench update` with that optimizer in UpdateRank.
EQUATION_CHUNK = 1 << 16

# Elements of a compiled update's trial run. The compiler takes the first length it meets as typical. From 128 elements
# it builds loops for one thread (0.71 ns per parameter with one thread or two), from this number 0.53 with two. Again:
# `megamix bench update`, 2 threads.
TRIAL = 1 << 20

# Elements of a weight that are hashed at a time. On a CPU the second pass finds in cache what the first one left. On a
# GPU launches cost more than its cache saves, and the number bounds the memory of a check. A check at every 100th step
# then takes 0.006 % of a run. Again: `megamix bench train` with a check in every step.
HASH_CHUNK, HASH_CHUNK_GPU = 1 << 18, 1 << 24

# Elements of logits that exist at a time, on a CPU and elsewhere. LOSS_CHUNK: a chunk that is multiplied at once.
# LOSS_ROWS: its least rows, because each chunk reads and writes the whole FP32 gradient of the weight. LOSS_PART: the
# part of a chunk that is widened at once; on a CPU its 2 MB of FP32 stay in cache. Again: `megamix bench train`.
LOSS_CHUNK = (2**19, 2**27)
LOSS_ROWS = 128
LOSS_PART = (2**19, 2**26)

# Most padding, as a share of all elements, for which matrices lie whole in one shard. Padding is held, gathered and
# reduced: 4 + 8/d bytes an element. A matrix in several shards sends 4 (d - 1)/d to the rank that computes with it and
# back.
MOST_PADDING = 0.125

# Most work beyond its even share that a rank takes because it holds most of a matrix already.
MOST_EXTRA_WORK = 0.05

# A checkpoint's elements that are written at a time (4 MiB), so that the checksum reads them from the cache, and bytes
# that a thread reads ahead, of which two chunks stay in cache. A load took 94 ms, 116 in a plain loop, and 131 when the
# kernel was asked to read 16 or 32 MiB ahead. Again: `megamix bench checkpoint` at bbfe85b7.
SAVED_CHUNK = 1 << 20
READ_AHEAD = 1 << 20

# Elements below which a gradient waits for others of its bucket and is copied with them in one call. A copy of 1 Ki
# elements took 1.5 us with others and 2.0 alone, one of 16 Ki 6.7 and 7.0, so holding larger ones would gain nothing.
# Again: `megamix bench host`, states.
SMALL_GRAD = 1 << 14

# Elements below which a unit of `shard = "parameters"` is gathered and updated together with its neighbours, but at
# most the model's elements / LEAST_UNITS, because two of these have memory at a time. A unit alone costs the host 0.4
# ms a step, joined with others 0.1. Again: `megamix bench host`.
LEAST_UNIT = 1_000_000
LEAST_UNITS = 8

# Chunks of a packed sequence for each context-parallel rank. With 8 ranks, 131,072 tokens and documents of heavy-tailed
# lengths, attention's work on the busiest rank is 1.16 times the mean with 4 chunks, 1.01 times with 8, and 2.1 times
# with the two of an unpacked sequence.
DEALT_CHUNKS = 8
