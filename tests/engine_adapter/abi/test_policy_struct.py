"""The struct of the policy's functions in C is that of the policy's table of operations."""

from __future__ import annotations

import re
from pathlib import Path

import expertier.engine_adapter.abi.structs as abi
from expertier.planner.policy.operations import OPERATIONS

HEADER = Path(abi.__file__).parents[1] / "ggml_proxy" / "abi" / "abi.h"


def test_the_c_struct_has_the_operations_of_the_table() -> None:
    struct = re.search(r"struct expertier_policy \{(.*?)\n\};", HEADER.read_text(), re.DOTALL)
    assert struct is not None
    fields = [" ".join(field.split()) + ";" for field in struct[1].split(";")[:-1]]
    assert fields == [operation.c_declaration() for operation in OPERATIONS if operation.for_engine]
