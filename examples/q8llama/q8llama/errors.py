# SPDX-License-Identifier: Apache-2.0
"""The one error that a user of this package meets: a model file that it cannot run."""


class ModelError(ValueError):
    """The file is no model that runs here; the text says which file and why."""
