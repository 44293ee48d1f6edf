# SPDX-License-Identifier: Apache-2.0
"""Package layout, and the ops compiled at installation on request; everything else is in pyproject.toml.

The top-level folders ``ops``, ``configs`` and ``benchmarks`` are installed as ``tencache_ds.ops`` and so on, which
``package_dir`` can say and static package discovery cannot.

``TENCACHE_BUILD_OPS=1 pip install --no-build-isolation .`` compiles TenCache's ops now instead of at their first use.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent.resolve()
MAPPED_FOLDERS = ("ops", "configs", "benchmarks")


def packages() -> list[str]:
    """Names of all packages, with those of the mapped folders under ``tencache_ds``."""
    names = find_packages(include=["tencache_ds", "tencache_ds.*"])
    names = [name for name in names if name.partition(".")[2].partition(".")[0] not in MAPPED_FOLDERS]
    for folder in MAPPED_FOLDERS:
        names.append(f"tencache_ds.{folder}")
        names.extend(f"tencache_ds.{folder}.{name}" for name in find_packages(folder))
    return names


def native_ops() -> dict[str, object]:
    """The arguments of setup() that compile the ops, where the environment asks for it."""
    if os.environ.get("TENCACHE_BUILD_OPS", "0") in ("", "0"):
        return {}
    try:
        import deepspeed  # noqa: F401
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        sys.exit(
            f"TENCACHE_BUILD_OPS=1 compiles against the installed torch and DeepSpeed, but {error.name} cannot be "
            "imported: install both first, then run TENCACHE_BUILD_OPS=1 pip install --no-build-isolation ."
        )
    sys.path.insert(0, str(ROOT))
    import tencache_ds  # noqa: F401

    # In the source tree the package is not where its name says.
    spec = importlib.util.spec_from_file_location(
        "tencache_ds.ops", ROOT / "ops" / "__init__.py", submodule_search_locations=[str(ROOT / "ops")]
    )
    sys.modules["tencache_ds.ops"] = importlib.util.module_from_spec(spec)
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    from tencache_ds.ops.tencache_aio import TenCacheAioBuilder
    from tencache_ds.ops.tencache_lend import TenCacheLendBuilder
    from tencache_ds.ops.tencache_update import TenCacheUpdateBuilder

    builders = [TenCacheUpdateBuilder()]
    if TenCacheAioBuilder().is_compatible(verbose=False):
        builders.append(TenCacheAioBuilder())
    else:
        print(
            "tencache_aio is not compiled: libaio or its headers are missing (apt install libaio-dev)", file=sys.stderr
        )
    if torch.version.cuda is not None and CUDA_HOME is not None:
        builders.append(TenCacheLendBuilder())
    return {
        "ext_modules": [builder.extension(ROOT) for builder in builders],
        "cmdclass": {"build_ext": BuildExtension},
    }


setup(
    packages=packages(),
    package_dir={f"tencache_ds.{folder}": folder for folder in MAPPED_FOLDERS},
    package_data={
        "tencache_ds": ["py.typed"],
        "tencache_ds.benchmarks": ["**/*.j2"],
        "tencache_ds.configs": ["*.json"],
        "tencache_ds.ops": ["**/*.cpp", "**/*.h", "**/*.inc", "**/*.cu", "**/*.cuh"],
    },
    include_package_data=False,
    **native_ops(),
)
