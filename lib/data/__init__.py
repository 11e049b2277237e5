"""Prompts: rows -> tokens -> each rank's share of a step. Batches: balanced over ranks, split into micro-batches."""
# ruff: noqa: F401

from lib.data.balance import (
    attention_width,
    balance_groups,
    count_patches,
    equal_widths,
    exchange_groups,
    gather_groups,
    gather_rows,
    own_groups,
    pad_rows,
    rows_by_uid,
    scatter_rows,
    split_mini_batches,
)
from lib.data.chat_template import SpecialTokenEscaper, response_texts
from lib.data.dataset import PromptDataset, RLHFDataset, load_dataset_class
from lib.data.loader import ROW, collate_fn, make_loader
from lib.data.micro_batches import (
    LAYOUT,
    PrefixTree,
    on_host,
    prefix_tree,
    prepare_dynamic_batch,
    restore_dynamic_batch,
)
from lib.data.remote import local_copy
from lib.data.rows import load_split
