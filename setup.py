"""Packaging of sp_compiler.

The optimisation passes live in ``passes/`` beside ``sp_compiler/`` and are installed as
``sp_compiler.passes``: an installed package leaves no top-level module called ``passes`` behind.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# The committed link sp_compiler/passes is skipped: an unpacked source archive may have lost it.
INFRASTRUCTURE = find_packages(
    include=["sp_compiler", "sp_compiler.*"], exclude=["sp_compiler.passes", "sp_compiler.passes.*"]
)
PASSES = ["sp_compiler.passes", *(f"sp_compiler.passes.{name}" for name in find_packages("passes"))]

PLOT = "matplotlib>=3.8"
TEST = [
    "hypothesis>=6.100",
    PLOT,
    "mypy>=1.15",
    # Exact schedules, to which those of the compiler are compared.
    "ortools>=9.12,<10",
    "peft>=0.15",
    "pytest>=8",
    "pytest-xdist>=3.6",
    "ruff>=0.9",
    "transformers>=5.0,<6",
    # PyTorch for CPUs comes without it; it interprets, and compiles for, GPUs that are not there.
    "triton>=3.6,<4; sys_platform == 'linux' and platform_machine == 'x86_64'",
]

setup(
    name="sp-compiler",
    version="0.1.0",
    description="Tensor- and sequence-parallel training of unmodified PyTorch transformers, "
    "with selective recomputation and overlapped communication",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.13",
    packages=[*INFRASTRUCTURE, *PASSES],
    package_dir={"sp_compiler": "sp_compiler", "sp_compiler.passes": "passes"},
    package_data={
        "sp_compiler": [
            "py.typed",
            "planning/plan_page.html",
            "grid_plan/grid_page.html",
            "graph_diff/diff_page.html",
            "verification/verify_page.html",
            "command_line/presets.toml",
            "cost/profiles/*.toml",
        ]
    },
    install_requires=[
        "jinja2>=3.1",
        "networkx>=2.5.1",
        "numpy>=1.26",
        "packaging>=23",
        "rich>=13",
        "safetensors>=0.4",
        "scipy>=1.11",
        "spmd-types>=0.3.1,<0.4",
        "sympy>=1.13",
        "torch>=2.11,!=2.14.0,<2.16",
        "typer>=0.12",
    ],
    extras_require={
        "test": TEST,
        "plot": [PLOT],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6"],
        "examples": ["transformers>=5.0,<6"],
        # An optional peer of the benchmarks; the others need nothing more.
        "bench": ["megatron-core==0.16.1"],
    },
    entry_points={
        "console_scripts": ["sp-compiler = sp_compiler.command_line.app:main"],
        "torch_dynamo_backends": [
            "sp_compiler = sp_compiler.torch_compile.backend:sp_compiler_backend"
        ],
    },
)
