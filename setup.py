# SPDX-License-Identifier: Apache-2.0
"""Package layout only; everything else is in pyproject.toml.

The top-level folders ``ops``, ``configs`` and ``benchmarks`` are installed as ``tencache_ds.ops`` and so on, which
``package_dir`` can say and static package discovery cannot.
"""

from setuptools import find_packages, setup

MAPPED_FOLDERS = ("ops", "configs", "benchmarks")


def packages() -> list[str]:
    """Names of all packages, with those of the mapped folders under ``tencache_ds``."""
    names = find_packages(include=["tencache_ds", "tencache_ds.*"])
    for folder in MAPPED_FOLDERS:
        names.append(f"tencache_ds.{folder}")
        names.extend(f"tencache_ds.{folder}.{name}" for name in find_packages(folder))
    return names


setup(
    packages=packages(),
    package_dir={f"tencache_ds.{folder}": folder for folder in MAPPED_FOLDERS},
    package_data={
        "tencache_ds": ["py.typed"],
        "tencache_ds.configs": ["*.json"],
        "tencache_ds.ops": ["**/*.cpp", "**/*.h", "**/*.inc", "**/*.cu", "**/*.cuh"],
    },
    include_package_data=False,
)
