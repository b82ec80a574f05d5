"""Cases that two engines of several ranks hand over."""

from __future__ import annotations

from tests.vllm import vllm_cases as cases

MODEL, RANKS = "demo-2-layers", cases.num_ranks(2)
SHARED = 4 * cases.BLOCK_SIZE
# The caches have 64 blocks; host memory holds four times as many. A block has 32 KiB in all layers
# and ranks.
NUM_HOST_BLOCKS = 4 * 64
HOST_BYTES = NUM_HOST_BLOCKS * 2**15
# Tokens of a turn that another engine fetches, and those in full blocks.
NUM_FETCH_TOKENS = 330
FETCHED = NUM_FETCH_TOKENS // cases.BLOCK_SIZE * cases.BLOCK_SIZE
# Ranks of the engines that hand over to each other with different numbers of ranks.
WAYS = ("1 to 2", "2 to 1")
LENGTHS = [1, 31, 32, 33, cases.CHUNK, cases.CHUNK + 1, 3 * cases.CHUNK + 5]


def one_by_one() -> list[cases.Case]:
    base, seeded = cases.prompt(SHARED, 51), {"temperature": 1.0, "seed": 7}
    long = cases.prompt(2 * cases.CHUNK + 40, 52)
    return [
        *(cases.greedy(f"length-{n}", cases.prompt(n, 50), 12) for n in LENGTHS),
        # This request ends with its first token, so only the prefill engine has its blocks.
        cases.greedy("base", base, 1),
        cases.greedy("shared", base + cases.prompt(50, 53), 8),
        cases.greedy("again", base + cases.prompt(50, 53), 8),
        cases.greedy("seeded", long, 12, **seeded),
        cases.greedy("penalties", cases.prompt(1, 50), 12, frequency_penalty=1.5),
        *(
            {
                **cases.greedy(f"spoiled-{rank}", cases.prompt(230, 60 + rank), 8),
                "spoiled_rank": rank,
            }
            for rank in range(RANKS)
        ),
        # The caches still hold the first blocks of some of these prompts, all of others, or
        # nothing.
        *(
            cases.greedy(f"spoiled-{rank}-again", cases.prompt(230, 60 + rank), 8)
            for rank in (0, 1)
        ),
        *(cases.greedy(f"length-{n}-again", cases.prompt(n, 50), 12) for n in reversed(LENGTHS)),
        cases.greedy("long-again", long, 4),
        cases.greedy("long-at-once-again", long, 4),
        *waiting(),
    ]


def waiting() -> list[cases.Case]:
    """Requests that are submitted to the decode engine before their handoff is committed."""
    lengths = {"waits-1": 3 * cases.CHUNK + 5, "waits-2": 70, "waits-3": 64, "waits-4": 8}
    return [
        {**cases.greedy(name, cases.prompt(length, 71), 8), "waits": True}
        for name, length in lengths.items()
    ]


def unequal(way: str) -> list[cases.Case]:
    """Requests that engines of one and of two ranks hand over to each other."""
    number = 81 if way == "1 to 2" else 91
    shared = cases.prompt(SHARED, number)
    return [
        *(
            cases.greedy(f"{way}, length-{n}", cases.prompt(n, number + 1), 12)
            for n in (1, 33, cases.CHUNK + 1, 3 * cases.CHUNK + 5)
        ),
        cases.greedy(
            f"{way}, seeded",
            cases.prompt(2 * cases.CHUNK + 40, number + 2),
            12,
            temperature=1.0,
            seed=7,
        ),
        # The second one finds its first blocks in the caches of both engines.
        cases.greedy(f"{way}, shared", shared + cases.prompt(50, number + 3), 8),
        cases.greedy(f"{way}, shared-again", shared + cases.prompt(40, number + 4), 8),
        {**cases.greedy(f"{way}, waits", cases.prompt(300, number + 5), 8), "waits": True},
        {
            **cases.greedy(f"{way}, spoiled", cases.prompt(230, number + 6), 8),
            # The last of the sender's ranks.
            "spoiled_rank": int(way[0]) - 1,
        },
    ]


def together() -> list[cases.Case]:
    return [cases.greedy(f"together-{n}", cases.prompt(20 + 90 * n, 54), 10) for n in range(6)]


# First blocks of a prompt that stay when its other blocks are deleted.
NUM_KEPT = 3
