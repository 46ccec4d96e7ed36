# SPDX-License-Identifier: Apache-2.0
"""What a user sets: the backend, and options through `--additional-config '{"dsl": {...}}'`."""

import enum
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dsl_backend.attention import dispatch
from dsl_backend.experts import dispatch as experts_dispatch
from dsl_backend.linear.scaled import dispatch as scaled_dispatch
from dsl_backend.quant.format import E4M3, KVFormat
from dsl_backend.runtime.target import Target
from dsl_backend.vllm_plugin.enum_members import NAME


class ServedBy(enum.Enum):
    """Whose kernels serve layers of a model."""

    MEASURED = "measured"  # dsl's where they were measured to be faster, for the numbers of tokens that they were
    DSL = "dsl"
    VLLM = "vllm"


class Options(BaseModel):
    """The plugin's options.

    Attributes:
        attention_kernel: only kernels of this name from the dispatch table serve attention; a layer that they do not
            serve is an error. By default each operation gets the best kernel that serves it.
        fp8_queries: vLLM quantises the queries of layers with an NVFP4 cache, and with `cute-fp8` those of layers with
            an e4m3 cache, by the checkpoint's scale or 1, which compiled models fuse with what precedes. By default
            `cute-fp8` gives each row of queries a scale of its own, and all other queries have 16 bits.
        experts: whose kernels serve routed experts; those that dsl cannot serve are vLLM's.
        experts_kernel: with `experts` of dsl, serve them with the kernels of this name from the dispatch table; layers
            that these do not serve are vLLM's. By default each layer gets the best kernel that serves.
        shared_experts: whose kernels serve shared experts of layers whose routed ones dsl serves: dsl's compute them
            with the routed ones; `measured` is vLLM's, because dsl's were not faster (H200).
        projections: whose kernels serve linear layers without an activation, and the logits', for up to 64 rows; those
            that dsl cannot serve, and more rows, are vLLM's. `measured` is dsl's for the rows of the tuning records,
            and on an SM90 for up to 16 rows of sizes without a record.
        scaled_linears: whose kernels serve linear layers of fp8 checkpoints, with the activation and the quantisation
            between them. `measured` is dsl's for the rows of the tuning records, and vLLM's for all others.
        scaled_linears_kernel: serve them with the kernels of this name from the dispatch table; layers that these do
            not serve are vLLM's. By default each layer gets the best kernel that serves.
        weight_only_linears: whose kernels serve linear layers with weights of 4 or 8 bits and 16-bit inputs (GPTQ, AWQ,
            compressed-tensors); those that dsl cannot serve are vLLM's. `measured` is vLLM's, because dsl's take longer
            with many rows (H200).
        norms: whose kernels serve RMSNorm of hidden states, with the residual in front of it; `measured` is dsl's on an
            SM90. In quantised models `dsl` serves those alone that it can have quantise for one of dsl's projections
            (`scaled_linears`), and `measured` none.
        rope: whose kernel normalises and rotates queries and keys, and writes keys and values, in one launch;
            `measured` is dsl's on an SM90.
        logprobs: whose kernels find the likeliest tokens of raw logits, and the ranks of the drawn ones; `measured` is
            vLLM's, because none was measured to be faster.
        launches_by_lengths: a step with prompts chooses its launches by the lengths of each request, and not by the
            longest alone; by default on an SM90. It may be switched off, because it costs host time.
        mla_latent_queries: queries of MLA up to this long attend in latent space, longer ones to projected keys.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    attention_kernel: str | None = None
    # Not timed on a GPU.
    fp8_queries: Annotated[bool, Field(strict=True)] = False
    experts: ServedBy = ServedBy.MEASURED
    experts_kernel: str | None = None
    shared_experts: ServedBy = ServedBy.MEASURED
    # With dsl's projections, norms and rope, Llama-8B has 1.18 times FLASH_ATTN's rate with one request (H200), and
    # without them 1.06 (H100).
    projections: ServedBy = ServedBy.MEASURED
    scaled_linears: ServedBy = ServedBy.VLLM
    scaled_linears_kernel: str | None = None
    weight_only_linears: ServedBy = ServedBy.VLLM
    norms: ServedBy = ServedBy.MEASURED
    rope: ServedBy = ServedBy.MEASURED
    logprobs: ServedBy = ServedBy.MEASURED
    # On an SM90 prefill has 1.11 times the rate (H200, 37 rows), for 0.1 to 0.2 ms of host time a step with prompts.
    launches_by_lengths: Annotated[bool | None, Field(strict=True)] = None
    # As FLASH_ATTN_MLA has it. In latent space a key costs a head of DeepSeek's sizes 1088 products instead of 320, but
    # neither the context nor the new tokens are projected up for it, in a dozen launches a layer.
    mla_latent_queries: Annotated[int, Field(strict=True, gt=0)] = 512

    @field_validator("attention_kernel")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        return one_of(name, (entry.name for entries in dispatch.TABLE.values() for entry in entries))

    def quantises_queries(self, kv: KVFormat) -> bool:
        """Whether vLLM quantises the queries of a layer with such a cache.

        Raises:
            ValueError: the cache is e4m3, and the layer's kernel is not `cute-fp8`: it would convert them to 16 bits.
        """
        if not self.fp8_queries or not (kv == E4M3 or kv.nvfp4):
            return False
        if kv == E4M3 and self.attention_kernel != dispatch.FP8_PRODUCTS:
            raise ValueError(
                f"fp8_queries is true and attention_kernel {self.attention_kernel!r}: quantised queries over a "
                f"cache of {E4M3.name} are those of {dispatch.FP8_PRODUCTS!r}"
            )
        return True

    @field_validator("experts_kernel")
    @classmethod
    def _known_of_experts(cls, name: str | None) -> str | None:
        return one_of(name, (entry.name for entry in experts_dispatch.TABLE))

    @model_validator(mode="after")
    def _experts_of_a_kernel(self) -> "Options":
        if self.experts_kernel is not None and self.experts is not ServedBy.DSL:
            raise ValueError(
                f"experts_kernel is {self.experts_kernel!r} and experts {self.experts.value!r}: a kernel is named with "
                f"'dsl' alone"
            )
        return self

    @field_validator("scaled_linears_kernel")
    @classmethod
    def _known_of_scaled_linears(cls, name: str | None) -> str | None:
        return one_of(name, (entry.name for entry in scaled_dispatch.TABLE))


def one_of(name: str | None, names: Iterable[str]) -> str | None:
    """The name of a kernel. Raises ValueError: it is none of those."""
    known = list(dict.fromkeys(names))
    if name is not None and name not in known:
        raise ValueError(f"{name!r} is not one of {', '.join(known)}")
    return name


# Options with which log-probabilities and speed of served models were measured on SM90 alone.
MEASURED_ON_SM90 = ("norms", "rope")
# Options for which nothing was measured to be faster.
NEVER_MEASURED_FASTER = ("shared_experts", "weight_only_linears", "logprobs")


def leaves_to_vllm(given: Options, key: str, target: Target) -> bool:
    """Whether an option, a `ServedBy`, has vLLM serve all that it is about on a target, whatever the layer."""
    served_by = getattr(given, key)
    if served_by is not ServedBy.MEASURED:
        return served_by is ServedBy.VLLM
    return key in NEVER_MEASURED_FASTER or (key in MEASURED_ON_SM90 and target.kernel_arch != "sm90")


def against_kernels(vllm_config: Any, key: str, target: Target) -> str:
    """Why the options `norms` and `rope`, by their key, leave a kind of module to vLLM; empty where they do not."""
    given = of(vllm_config)
    if getattr(given, key) is ServedBy.VLLM:
        return f"additional_config['dsl']['{key}'] is vllm"
    if leaves_to_vllm(given, key, target):
        return f"models that dsl serves were measured on sm_90a, and not on {target.arch}: {asked(key)}"
    return ""


def asked(key: str) -> str:
    """How a user has dsl serve what an option names."""
    return f"""--additional-config '{{"dsl": {{"{key}": "dsl"}}}}' has dsl serve them"""


def of(vllm_config: Any) -> Options:
    """The options in a VllmConfig; the defaults where it has none.

    Raises:
        ValueError: a key is unknown or a value does not fit; the message lists what is accepted.
    """
    additional = getattr(vllm_config, "additional_config", None)
    given = given_in(additional) if isinstance(additional, dict) else {}
    accepted = ", ".join(Options.model_fields)
    if not isinstance(given, dict):
        raise ValueError(f"additional_config['dsl'] is {given!r}: an object with the keys {accepted} is needed")
    try:
        return Options(**given)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, issue['loc']))}: {problem_of(issue)}" for issue in error.errors()]
        raise ValueError(
            f"additional_config['dsl'] is not valid: {'; '.join(problems)} (accepted keys: {accepted})"
        ) from None


def given_in(additional: Mapping[str, Any]) -> Any:
    """What an additional_config has for dsl. Raises ValueError: it is there under a key in another case."""
    for key in additional:
        if isinstance(key, str) and key != "dsl" and key.lower() == "dsl":
            raise ValueError(f"additional_config has the key {key!r}, which is not read: use 'dsl'")
    return additional.get("dsl", {})


def problem_of(issue: Mapping[str, Any]) -> str:
    """What pydantic says about a value, which it does not name itself."""
    if issue["type"] == "extra_forbidden":
        return "unknown key"
    if issue["type"] == "value_error":
        return str(issue["msg"]).removeprefix("Value error, ")
    return f"{issue['msg']}, not {issue['input']!r}"


def serves_attention(vllm_config: Any) -> bool:
    """Whether dsl is the attention backend, or that of some kind of layers."""
    settings = vllm_config.attention_config
    chosen = [settings.backend, *getattr(settings, "backend_per_kind", {}).values()]
    return any(getattr(backend, "name", None) == NAME for backend in chosen)
