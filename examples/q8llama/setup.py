# SPDX-License-Identifier: Apache-2.0
"""Two things are built: the tuned family of q8llama/kernels.py, and the forward pass, C that calls it and tunekit."""

import sysconfig

from setuptools import Extension, setup
from tunekit.build_tools.hook import FamilyExtension, build_ext

import tunekit

# The limited API: one file for every CPython from 3.11 on. (A free-threaded one has none.)
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")


class build(build_ext):
    """The family first: the forward pass is compiled against the header that comes with it."""

    def build_extension(self, extension):
        super().build_extension(extension)
        if isinstance(extension, FamilyExtension):
            headers = [str(path.parent) for path, _ in self.tunekit_files if path.suffix == ".h"]
            for other in self.extensions:
                other.include_dirs = [*(getattr(other, "include_dirs", None) or []), *headers]


ENGINE = Extension(
    "q8llama._engine",
    ["q8llama/engine.c", "q8llama/model.c"],
    depends=["q8llama/model.h"],
    include_dirs=[tunekit.get_include()],
    py_limited_api=LIMITED,
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED else [],
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
)

setup(
    packages=["q8llama"],
    package_data={"q8llama": ["*.c", "*.h", "*.pyi"]},
    ext_modules=[FamilyExtension("q8llama/kernels.py"), ENGINE],
    cmdclass={"build_ext": build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
    zip_safe=False,
)
