"""Adds the CUDA extension to what pyproject.toml declares, where nvcc is found."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
import build_support

NVCC, WHY_NONE = build_support.choose_nvcc(os.environ)


def explain_missing_extension() -> None:
    if NVCC is None:
        print(f"flash_attn without its CUDA extension ({WHY_NONE}): the Python part runs anywhere")


class BuildPython(build_py):
    def run(self) -> None:
        explain_missing_extension()
        # setuptools packs the whole folder, with whatever an earlier build left in it.
        if not self.editable_mode and build_support.is_product(Path(self.build_lib)):
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildExtension(build_ext):
    def run(self) -> None:
        if NVCC is None:
            explain_missing_extension()
        super().run()
        if self.inplace:  # a module for one version of Python would be imported instead
            for other in Path("flash_attn").glob("_C.cpython-*.so"):
                other.unlink()

    def build_extension(self, ext: Extension) -> None:
        assert NVCC is not None
        module = build_support.build_extension(os.environ, NVCC)
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.copy_file(str(module), target)


URL = os.environ.get("FLASH_ATTN_URL", "")

setup(
    long_description=build_support.long_description(URL),
    long_description_content_type="text/markdown",
    project_urls=build_support.project_urls(URL),
    ext_modules=[Extension("flash_attn._C", sources=[], py_limited_api=True)] if NVCC else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if NVCC else {},
    cmdclass={"build_py": BuildPython, "build_ext": BuildExtension},
)
