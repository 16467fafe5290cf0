"""HAE lab: what happens to a model when tokens are evicted from its KV cache.

Record a model's attention, replay it through eviction policies, compare what each loses, and let a
policy evict inside a running model (hae.hf). Test policies of your own with hae.testing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module it lives in (and in __init__.pyi). Each is imported when first used, so
# that a recorder does not wait for pandas, nor a comparison for torch.
_HOME = {
    "open": "sequences",
    "sequence": "sequences",
    "write": "sequences",
    "check": "sequences",
    "Trace": "_engine",
    "Sequence": "_engine",
    "SequenceInfo": "_engine",
    "SequenceDetails": "_engine",
    "policy": "comparison",
    "policies": "comparison",
    "replay": "comparison",
    "compare": "comparison",
    "stats": "comparison",
    "Run": "comparison",
    "Comparison": "comparison",
    "read_comparison": "result_folder",
    "ResultError": "run_file",
    "Policy": "policy_class",
    "PolicyRun": "policy_class",
    "Decision": "policy_class",
    "Evict": "policy_class",
    "Mark": "policy_class",
    "Limits": "policy_class",
    "Merge": "policy_class",
    "Needs": "policy_class",
    "TraceError": "_engine",
    "NeedsError": "_engine",
    "ConfigError": "_engine",
    "ContractViolation": "_engine",
    "OutputError": "_engine",
    "validate": "validation",
    "Validation": "validation",
}

# Modules with dependencies of their own.
_MODULES = ("fates", "hf", "plots", "testing")

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hae.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'hae' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hae.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
