# SPDX-License-Identifier: Apache-2.0
"""The attention kernels with e4m3 products as kernels whose mutants are judged: by what their arithmetic gives."""

from functools import partial
from typing import Any

from suite import Rows, Suite

from dsl_backend.attention.cute.sm90 import dense_host as dense_sm90
from dsl_backend.attention.cute.sm90 import mla_host as mla_sm90
from dsl_backend.attention.cute.sm90.fp8_configs import Fp8Config
from dsl_backend.attention.cute.sm90.mla_fp8_configs import Fp8MlaConfig as HopperMlaConfig
from dsl_backend.attention.cute.sm100 import dense_host as dense_sm100
from dsl_backend.attention.cute.sm100 import mla_host as mla_sm100
from dsl_backend.attention.cute.sm100.fp8_configs import Fp8DenseConfig
from dsl_backend.attention.cute.sm100.mla_fp8_configs import Fp8MlaConfig
from dsl_backend.testing import fp8_attention
from dsl_backend.testing.cases import Case, mla
from tests.attention import (
    mutants,
    test_mla_sm90_fp8,
    test_mla_sm100_fp8,
    test_sm90_fp8,
    test_sm100_fp8,
)
from tests.attention.mutants import SM90, Judge, subject


def judge_of(module: Any, config: Any, **more: float) -> Judge:
    """What the arithmetic of a kernel gives, which the module of its tests has."""
    return partial(fp8_attention.judge, arithmetic=module.arithmetic_of(config), **more)


# Several work tiles of a CTA; rings of two stages go round; the last key tiles end in the middle.
LONG = Case(q_lens=(150, 70), kv_lens=(160, 70), heads=(2, 1), dim=64, page=32, fp8=True)
LATENT = mla(16, (288, 256), q_lens=(5, 1, 4), kv_lens=(200, 33, 90), page=32, fp8=True)
HOPPER = Fp8Config(groups=1, tile_n=64, stages=2, accumulate_period=2)
BLACKWELL = Fp8DenseConfig(tile_n=64, stages=2, query_stages=1, late_p_keys=32, ex2_emulation=0, rounded_sums=True)
HOPPER_MLA, BLACKWELL_MLA = HopperMlaConfig(stages=2, dequant_stages=2), Fp8MlaConfig(tile_n=32, stages=2)
FLIPPED = {"flipped_part": test_mla_sm90_fp8.FLIPPED_PART}

KERNELS = {
    kernel.name: kernel
    for kernel in (
        subject(
            "SM90 forward e4m3",
            dense_sm90.Fp8Prefill,
            HOPPER,
            (LONG,),
            SM90,
            judge=judge_of(test_sm90_fp8, HOPPER),
        ),
        subject(
            "SM100 forward e4m3",
            dense_sm100.Fp8Prefill,
            BLACKWELL,
            (LONG,),
            judge=judge_of(test_sm100_fp8, BLACKWELL),
        ),
        subject(
            "SM90 MLA e4m3",
            mla_sm90.Fp8Mla,
            HOPPER_MLA,
            (LATENT,),
            SM90,
            judge=judge_of(test_mla_sm90_fp8, HOPPER_MLA, **FLIPPED),
        ),
        subject(
            "SM100 MLA e4m3",
            mla_sm100.Fp8Mla,
            BLACKWELL_MLA,
            (LATENT,),
            judge=judge_of(test_mla_sm100_fp8, BLACKWELL_MLA, **FLIPPED),
        ),
    )
}

EQUIVALENT: Rows = mutants.EQUIVALENT
HEAD = """# Mutants of the attention kernels with e4m3 products

Made by `python tests/emulator/mutants/report.py --suite tests.attention.fp8_mutants`.
"""

SUITE = Suite([*KERNELS], KERNELS.__getitem__, EQUIVALENT, mutants.UNSEEN, HEAD)
