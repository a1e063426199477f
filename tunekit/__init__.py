# SPDX-License-Identifier: Apache-2.0
"""tunekit: one reference function, a grid of generated native kernels, and the one that is fastest on this box.

The public names are in ``__all__``. Importing tunekit loads neither a compiler's worth of tools nor NumPy; rows
are chosen at first use.
"""

from __future__ import annotations

from tunekit import _early  # noqa: F401 - the first of all
from tunekit._policy import Guard, policy
from tunekit._status import StatusRow, log_status, status
from tunekit.declare import Scope, companion, tune, tune_manifest
from tunekit.dispatch import Tuned, TunedFunction, Variant
from tunekit.errors import (
    AbiError,
    ChoiceError,
    DeclarationError,
    ForeignManifest,
    GateError,
    MalformedManifest,
    ManifestError,
    PolicyError,
    SettingError,
    StaleManifest,
    TemplateError,
    ToolchainError,
    TunekitError,
    TunekitWarning,
)
from tunekit.kernel import Target
from tunekit.linking import get_include
from tunekit.rows import Row, perm
from tunekit.signature import In, InOut, Out, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from tunekit.team import lanes, threads

__version__ = "0.1.0"

__all__ = [
    "AbiError",
    "ChoiceError",
    "DeclarationError",
    "ForeignManifest",
    "GateError",
    "Guard",
    "In",
    "InOut",
    "MalformedManifest",
    "ManifestError",
    "Out",
    "PolicyError",
    "Row",
    "Scope",
    "SettingError",
    "StaleManifest",
    "StatusRow",
    "Target",
    "TemplateError",
    "ToolchainError",
    "Tuned",
    "TunedFunction",
    "TunekitError",
    "TunekitWarning",
    "Variant",
    "companion",
    "f32",
    "f64",
    "get_include",
    "i8",
    "i16",
    "i32",
    "i64",
    "lanes",
    "log_status",
    "perm",
    "policy",
    "status",
    "threads",
    "tune",
    "tune_manifest",
    "u8",
    "u16",
    "u32",
    "u64",
]
