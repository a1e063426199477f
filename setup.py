# SPDX-License-Identifier: Apache-2.0
"""The build of tunekit itself: a client of its own build tools, called directly."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
# A front end does not put the project's folder on the path, and the build tools are not installed yet.
sys.path.insert(0, str(HERE))

import build_tools.hook as hook  # noqa: E402
from tunekit import dispatch, paths  # noqa: E402

VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "tunekit/__init__.py").read_text(encoding="utf-8"), re.M)
TEMPLATES = ["isa", "module", "new", "q8q8"]

setup(
    name="tunekit-native",
    version=VERSION.group(1) if VERSION else "0",
    description="One reference function to a tuned native kernel family: generated, proven and chosen on the box",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        "tunekit",
        "tunekit.cpu",
        "tunekit.measure",
        "tunekit.q8",
        "tunekit.doctor",
        "tunekit.report",
        "tunekit.build_tools",
        "tunekit.templates",
        *(f"tunekit.templates.{name}" for name in TEMPLATES),
    ],
    package_dir={
        "tunekit.build_tools": "build_tools",
        "tunekit.templates": "templates",
        **{f"tunekit.templates.{name}": f"templates/{name}" for name in TEMPLATES},
    },
    package_data={
        "tunekit": ["py.typed", "csrc/*.c", "csrc/*.h", "csrc/ceiling/*.c"],
        **{f"tunekit.templates.{name}": ["*.h", "*.j2"] for name in TEMPLATES},
        "tunekit.report": ["*.css"],
        "tunekit.templates.new": ["*.txt"],
    },
    install_requires=[
        "cffi>=1.15",
        "jinja2>=3.0",
        "numpy>=1.24",
        "py-cpuinfo>=8",
        "setuptools>=64",
        "platformdirs>=2.6",
        "filelock>=3.8",
    ],
    extras_require={
        # The picture beside the HTML page of `python -m tunekit report`.
        "report": ["matplotlib>=3.7"],
        "test": [
            "pytest>=7",
            "pytest-xdist>=3",
            "hypothesis>=6",
            "ruff>=0.9",
            "mypy>=1.10",
            "gguf>=0.10",
            "matplotlib>=3.7",
            # Consumers of the linking tests.
            "cython>=3",
            "numba>=0.60",
            "pkgconf>=2.1",
            "scipy>=1.11",
            # A CPU of software for AVX-512 rows; wheels for these alone. tests/emulate/machine.py knows its version.
            "bochscpu-python==0.4.0; sys_platform == 'linux' and platform_machine == 'x86_64' "
            "and implementation_name == 'cpython'",
        ],
    },
    entry_points={
        "distutils.setup_keywords": ["tunekit_modules = tunekit.build_tools.hook:tunekit_modules"],
        "setuptools.finalize_distribution_options": ["tunekit = tunekit._optin:look"],
    },
    ext_modules=[
        hook.CoreExtension("tunekit/csrc"),
        hook.FamilyExtension(
            "tunekit/q8/kernels.py",
            "tunekit.q8",
            lambda: dispatch.declare_scope("tunekit"),
            headers=["tunekit/csrc/tunekit_q8.h", "tunekit/csrc/tunekit_team.h"],
        ),
    ],
    cmdclass={"build_ext": hook.build_ext},
    # The modules keep to the stable ABI, so one wheel serves every CPython from 3.11 on (a free-threaded one has none).
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ".abi3." in paths.module_suffix() else {},
    zip_safe=False,
)
