"""Texts that repeat themselves, and what a head drafts behind them, on any device."""

import torch

from fledge.ops.copies import DepthMaps, Text
from fledge.ops.paged import BlockTables
from fledge.ops.tree import Candidates

BLOCK_SIZE, NUM_BLOCKS, NUM_DEPTHS = 4, 600, 5
LENGTHS = (2, 7, 30, 30, 900, 2301, 1500, 60)
"""Some too short for a match, some longer than one program looks at."""


def texts() -> list[list[int]]:
    """Of each length; the fourth goes in circles, the next is of few tokens, the last of many."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(LENGTHS):
        text = torch.randint(0, 3 if number == 4 else 500, (length,), generator=generator).tolist()
        if number == 3:
            text = [number % 7 for number in range(length)]
        elif number in (2, 5, 6):
            match = (6, 16, 11)[(2, 5, 6).index(number)]
            text[-match:] = text[1 : 1 + match]
        found.append(text)
    return found


def some_text(device: torch.device, window: int | None = None) -> tuple[Text, list[list[int]]]:
    """Texts in blocks all over the memory; with a window their beginnings are gone."""
    said = texts()
    generator = torch.Generator().manual_seed(1)
    table_BP = torch.randperm(len(said) * NUM_BLOCKS, generator=generator).view(len(said), -1)
    tokens_S = torch.randint(0, 500, (table_BP.numel() * BLOCK_SIZE, 1), generator=generator)
    for row, text in enumerate(said):
        numbers = torch.arange(len(text) - 1)
        slots = table_BP[row, numbers // BLOCK_SIZE] * BLOCK_SIZE + numbers % BLOCK_SIZE
        tokens_S[slots, 0] = torch.tensor(text[:-1])
        if window is not None:
            table_BP[row, : max(0, len(text) - window) // BLOCK_SIZE] = -1
    tables = BlockTables(BLOCK_SIZE, {window: table_BP.to(device)})
    lens_B = torch.tensor([len(text) for text in said], device=device)
    newest_B = torch.tensor([text[-1] for text in said], device=device)
    return Text(tokens_S.to(device), tables, window, lens_B, newest_B), said


def some_chains(
    firsts: list[int], probability: float, count: int, device: torch.device
) -> Candidates:
    """Chains that begin as told, with one probability at every depth."""
    logprob = torch.tensor(probability).log()
    tokens_BC = torch.full((len(firsts), count), 3)
    tokens_BC[:, 0] = torch.tensor(firsts)
    logprobs_BC = logprob.repeat(len(firsts), count)
    parents_BC = torch.arange(-1, count - 1).repeat(len(firsts), 1)
    chains = (tokens_BC, logprobs_BC.cumsum(1), logprobs_BC, parents_BC)
    return Candidates(*(one.to(device) for one in chains))


def some_maps(device: torch.device) -> DepthMaps:
    """Four modes; every piece of every map is another line."""
    knots_K = torch.tensor([-5.0, -1.0, -0.3, -0.1, 0.0])
    generator = torch.Generator().manual_seed(2)
    lines = 0.1 + torch.rand(4, NUM_DEPTHS, 2, len(knots_K) + 1, generator=generator)
    lines[:, :, 0] *= -1
    return DepthMaps(knots_K.to(device), lines.to(device))
