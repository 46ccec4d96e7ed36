# SPDX-License-Identifier: Apache-2.0
"""The command `dsl-backend`. Torch and the kernels are imported by the subcommand that needs them."""

import importlib
import importlib.util
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

import dsl_backend
from dsl_backend.families import TUNED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dsl_backend.doctor import OperationReport, Report, VariantReport

WRONG_USE = 2
# The exit status that shells give a program which Ctrl-C ended.
INTERRUPTED = 130


class Interruptible(typer.core.TyperGroup):
    """Says in one line that Ctrl-C ended a subcommand, also one that still imports. Typer itself says nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            typer.echo(f"dsl-backend: interrupted{f': {error}' if str(error) else ''}", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    name="dsl-backend",
    cls=Interruptible,
    help="GPU kernels for vLLM: what serves here, and how fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(dsl_backend.__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every subcommand."""


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts and bug reports.")] = False,
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="Judge for an architecture such as sm_90a, sm_100a or cpu.")
    ] = None,
    additional_config: Annotated[
        str | None, typer.Option(metavar="JSON", help="Check what vllm serve would be given as --additional-config.")
    ] = None,
) -> None:
    """Report which kernels serve, which problems there are, and what to do. Exit status 1 for a problem."""
    from dsl_backend import doctor
    from dsl_backend.errors import InvalidInput

    try:
        report = doctor.examine(arch, additional_config)
    except InvalidInput as error:
        refuse(str(error))
    if json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        from rich.console import Console

        show(report, Console())
    raise typer.Exit(1 if report.problems else 0)


@app.command("env")
def environment(
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    hooks: Annotated[bool, typer.Option("--hooks", help="Only what the plugin changes in vLLM, and why.")] = False,
) -> None:
    """Print what a bug report needs: versions, GPU, driver, the kernel cache, and the variables that are set."""
    from dsl_backend import environment as module
    from dsl_backend.vllm_plugin import hooks as changes

    if hooks:
        typer.echo("\n".join(changes.lines()))
        return
    found = module.gather()
    typer.echo(found.model_dump_json(indent=2) if json else "\n".join(module.lines(found)))


# The benchmarks have a parser of their own, which `python -m benchmarks` uses as well; --help is theirs.
FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=FORWARDED)
def bench(context: typer.Context) -> None:
    """Measure operations side by side with the peers that are installed."""
    raise typer.Exit(benchmarks().run(context.args, "dsl-backend bench"))


@app.command()
def verify(
    quick: Annotated[bool, typer.Option("--quick", help="A quarter of the problems, one or two rows each.")] = False,
    json: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write everything, one JSON object a line.")
    ] = None,
    families: Annotated[
        str | None, typer.Option(help="Comma-separated operator families, such as decode; by default all.")
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="Comma-separated kernels of ours, by default all that serve here.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="PROBLEM", help="One problem of one family, no timing.")] = None,
    problems: Annotated[
        int | None, typer.Option(min=0, help="Random problems for each kernel and family, beside the table's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random problems.")] = 0,
    peers: Annotated[str | None, typer.Option(help="Comma-separated peers to time, all, or none.")] = None,
    times: Annotated[bool, typer.Option("--times/--no-times", help="Whether to time what was right.")] = True,
    device: Annotated[str, typer.Option(help="cuda; or cpu, at tiny sizes, to try this command.")] = "cuda",
) -> None:
    """Check every operator's kernels against the reference on this GPU, time them, and write a file to send in."""
    from rich.console import Console

    from dsl_backend import verify

    def listed(text: str | None) -> tuple[str, ...]:
        return tuple(name.strip() for name in (text or "").split(",") if name.strip())

    options = verify.Options(
        device=device,
        families=listed(families) or tuple(verify.CHECKS),
        kernels=listed(kernels),
        only=only,
        quick=quick,
        random=problems if problems is not None else verify.RANDOM_QUICK if quick else verify.RANDOM,
        seed=seed,
        peers=peers,
        times=times,
    )
    attempt(lambda: verify.run(options, json, benchmarks(), Console()))


@app.command()
def judge(
    candidate: Annotated[pathlib.Path, typer.Argument(metavar="CANDIDATE", help="A file with one provider of OP.")],
    op: Annotated[str, typer.Option(help="The operator, such as softmax.")],
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="Run on the emulator for sm_90a or sm_100a; needs no GPU.")
    ] = None,
    json: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write the result, one JSON object.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of sizes and inputs; by default a new one.")] = None,
    rows: Annotated[str | None, typer.Option(help="Regular expression for the rows to time.")] = None,
    peers: Annotated[str | None, typer.Option(help="Comma-separated peers to time, all, or none.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of importing, preparing, or a launch.")] = 240.0,
    memory: Annotated[int, typer.Option(min=256, help="Memory limit of the candidate's process, in MiB.")] = 16 << 10,
    gpu_memory: Annotated[int, typer.Option(min=1024, help="Its limit of GPU memory, in MiB.")] = 16 << 10,
    least_served: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the trials, and of the timed rows, that it must serve.")
    ] = 0.5,
) -> None:
    """Check an unknown kernel in a process of its own, and time it. Exit status 1 if it is rejected."""
    found = importlib.import_module(f"{benchmarks().__name__}.judge")
    options = found.Options(
        arch=arch,
        seed=seed,
        rows=rows,
        peers=peers,
        seconds=seconds,
        memory_mib=memory,
        gpu_memory_mib=gpu_memory,
        least_served=least_served,
    )
    attempt(lambda: found.main(candidate, op, json, options))


@app.command()
def tune(
    family: Annotated[
        str | None,
        typer.Argument(metavar="[FAMILY]", help=f"{', '.join(TUNED)}; by default all of them."),
    ] = None,
    classes: Annotated[str | None, typer.Option(metavar="REGEX", help="Only classes whose names it finds.")] = None,
    json: Annotated[
        pathlib.Path | None,
        typer.Option("--json", metavar="FILE", help="Merge the tuned configurations into this file."),
    ] = None,
    model: Annotated[
        pathlib.Path | None, typer.Option(metavar="CONFIG", help="Tune the layers of a model's config.json.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that will share the model.")] = 1,
    seconds: Annotated[float, typer.Option(help="Timing of each configuration in each row, in seconds.")] = 0.1,
    times: Annotated[
        pathlib.Path | None,
        typer.Option("--times", metavar="FILE", help="Write every configuration's time, one JSON object a line."),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Print the classes and their rows, time nothing.")] = False,
    candidates: Annotated[bool, typer.Option("--candidates", help="With --list: their configurations, too.")] = False,
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="With --list: of an architecture such as sm_90a; needs no GPU.")
    ] = None,
) -> None:
    """Find configurations that are faster than the default ones on this GPU, and write them to a file."""
    found = importlib.import_module(f"{benchmarks().__name__}.tune")
    attempt(
        lambda: found.main(
            family,
            classes,
            json,
            model=model,
            tensor_parallel=tensor_parallel,
            seconds=seconds,
            only_list=only_list,
            candidates=candidates,
            arch=arch,
            times_path=times,
        )
    )


@app.command("compile")
def compile_kernels(
    model: Annotated[
        pathlib.Path, typer.Option("--model", metavar="CONFIG", help="A model's config.json, or the folder with it.")
    ],
    arch: Annotated[
        list[str], typer.Option("--arch", metavar="ARCH", help="An architecture such as sm_90a; may be repeated.")
    ],
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that will share the model.")] = 1,
    expert_parallel: Annotated[int, typer.Option(min=1, help="Ranks that will share whole experts.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="The dtype to serve in, by default the model's own.")] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(help="The cache's dtype, as vLLM's: auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2 or nvfp4."),
    ] = "auto",
    experts_kernel: Annotated[
        str | None, typer.Option(help="A kernel of routed experts, as the server's option experts_kernel names it.")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only this operator's kernels; may be repeated.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes, by default one for each core.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object with every kernel.")] = False,
) -> None:
    """Compile all kernels that a model needs into the cache. Needs no GPU."""
    from dsl_backend import kernel_commands

    attempt(
        lambda: kernel_commands.compile_model(
            model,
            arch,
            tensor_parallel=tensor_parallel,
            expert_parallel=expert_parallel,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            experts_kernel=experts_kernel,
            only=family or (),
            jobs=jobs,
            as_json=json,
            say=typer.echo,
        )
    )


@app.command()
def draw(
    layout: Annotated[
        str, typer.Argument(help="Such as '((2,4),(8,2)):((1,8),(2,64))', or 'Sw<3,3,3> o (8,64):(64,1)'.")
    ],
    out: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Write the SVG there; by default to standard output.")
    ] = None,
    tile: Annotated[
        str | None,
        typer.Option(metavar="MxN", help="Show the owners of such a tile; the layout goes from (thread, value)."),
    ] = None,
    chunk: Annotated[int, typer.Option(metavar="N", help="Consecutive offsets of one colour.")] = 1,
) -> None:
    """Draw a CuTe layout as SVG: a table of offsets, or of the threads that own a tile's elements."""
    from dsl_backend import layout_svg, layouts

    def run() -> int:
        picture = layout_svg.draw(layouts.parse(layout), tile=layout_svg.tile_of(tile), chunk=chunk)
        if out is None:
            typer.echo(picture, nl=False)
        else:
            try:
                out.write_text(picture)
            except OSError as error:
                refuse(f"--out {out} cannot be written: {error.strerror}")
        return 0

    attempt(run)


cache_app = typer.Typer(help="Compiled kernels on disk.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@cache_app.command("list")
def cache_list(json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """List the compiled kernels, and whether this installation can still use them."""
    from dsl_backend import kernel_commands

    attempt(lambda: kernel_commands.list_cache(as_json=json, say=typer.echo))


@cache_app.command("clear")
def cache_clear(
    stale: Annotated[bool, typer.Option("--stale", help="Only what this installation cannot use.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Remove compiled kernels. Processes that have loaded them are not affected."""
    from dsl_backend import kernel_commands

    attempt(lambda: kernel_commands.clear_cache(only_stale=stale, as_json=json, say=typer.echo))


@cache_app.command("verify")
def cache_verify(json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Compare every entry with its checksum; exit status 1 where one is broken."""
    from dsl_backend import kernel_commands

    attempt(lambda: kernel_commands.verify_cache(as_json=json, say=typer.echo))


def attempt(command: Callable[[], int]) -> NoReturn:
    """Exit with the command's status, or with that of a wrong use."""
    from dsl_backend.errors import InvalidInput

    try:
        status = command()
    except InvalidInput as error:
        refuse(str(error))
    raise typer.Exit(status)


def benchmarks() -> Any:
    """The package of the benchmarks: from the wheel, or from the checkout."""
    found = [name for name in ("dsl_backend._benchmarks", "benchmarks") if importlib.util.find_spec(name) is not None]
    if not found:
        refuse("this installation has no benchmarks: install the wheel, or run from a checkout")
    return importlib.import_module(found[0])


def refuse(message: str) -> NoReturn:
    """Exit with a message on standard error and the status of a wrong use."""
    typer.echo(f"dsl-backend: {message}", err=True)
    raise typer.Exit(WRONG_USE)


def show(report: "Report", console: "Console") -> None:
    """Print the report: the verdict in three lines, then facts and tables."""
    from rich.markup import escape

    bad = bool(report.problems)
    for name, text, colour in (
        ("serves", report.verdict.serves, ""),
        ("wrong", report.verdict.wrong, "red" if bad else "green"),
        ("to do", report.verdict.todo, ""),
    ):
        said = f"[{colour}]{escape(text)}[/]" if colour else escape(text)
        console.print(f"[bold]{name:7}[/]{said}", highlight=False, soft_wrap=True)
    console.print()
    console.print(facts_table(report))
    console.print(kernels_table(report))
    reasons = reasons_of(report)
    if reasons:
        console.print("\n[bold]Why no better kernel serves[/]")
    for reason, (kernels, layers) in reasons.items():
        # All layers need no list.
        where = "" if layers == layers_with(report, kernels) else f" for {'; '.join(layers)}"
        console.print(f"{escape(reason)}\n    [dim]{escape(', '.join(kernels))}{escape(where)}[/]", highlight=False)


def facts_table(report: "Report") -> "Table":
    from rich.table import Table

    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("python", report.python)
    for name, version in report.versions.items():
        facts.add_row(name, version or "[dim]not installed[/]")
    target = report.target
    features = [name for name in ("wgmma", "tcgen05", "tma", "native_fp8", "native_bf16") if getattr(target, name)]
    size = "" if target.arch == "cpu" else f", {target.sm_count} SMs, {target.smem_bytes // 1024} KiB shared a block"
    facts.add_row("target", f"{target.arch} ({target.device}{size})")
    facts.add_row("has", ", ".join(features) or "[dim]no GPU feature that a kernel asks for[/]")
    if target.interpreted:
        facts.add_row("", "TRITON_INTERPRET=1: Triton kernels run in its interpreter")
    tuned = [f"{one.family} {one.here} of {one.records}" for one in report.tuned_configs]
    facts.add_row("tuned", f"configurations for this target: {', '.join(tuned)}")
    facts.add_row("plugin", report.plugin.entry_point or "[red]not found[/]")
    facts.add_row("variables", ", ".join(f"{name}={value}" for name, value in report.variables.items()) or "none set")
    return facts


def kernels_table(report: "Report") -> "Table":
    from rich.table import Table

    kernels = Table(title="\nWhich kernels serve a layer", title_justify="left", header_style="bold")
    kernels.add_column("layer", overflow="fold")
    kernels.add_column("served by", overflow="fold")
    for layer in report.layers:
        served = [served_by(one) for one in layer.operations]
        none = not any(one.served_by or one.by_name or one.with_option for one in layer.operations)
        kernels.add_row(layer.name, "[red]nothing[/]" if none else ", ".join(served))
    return kernels


def served_by(operation: "OperationReport") -> str:
    """The kernel, which of its variants serves which batches, and kernels that would serve if they were named.

    Where vLLM serves by the options, the kernel with the option that changes it.
    """
    from rich.markup import escape

    told = variants_of(operation.variants)
    for one in operation.by_name:
        asked = f"{one.option} {one.name}" if one.option else f"named {one.name}"
        of_variants = variants_of(one.variants)
        told.append(f"{asked}: {one.kernel}" + (f", {', '.join(of_variants)}" if of_variants else ""))
    rest = f" [dim]({escape('; '.join(told))})[/]" if told else ""
    if operation.with_option is not None:
        return f"vLLM's; with {operation.with_option} dsl: {operation.served_by or 'nothing'}{rest}"
    if operation.served_by is None:
        return f"[red]{operation.operation}: nothing[/]{rest}"
    return operation.served_by + rest


def variants_of(variants: "list[VariantReport]") -> list[str]:
    """Which of a kernel's variants serves which batches."""
    return [f"{one.name} for {one.batches}" if len(variants) > 1 else one.name for one in variants]


def layers_with(report: "Report", kernels: list[str]) -> list[str]:
    """The layers for which dispatch asked one of these kernels."""
    return [
        layer.name
        for layer in report.layers
        if any(one.kernel in kernels for operation in layer.operations for one in operation.kernels)
    ]


def reasons_of(report: "Report") -> dict[str, tuple[list[str], list[str]]]:
    """Each objection of kernels that come before the serving ones -> these kernels, and the layers."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for layer in report.layers:
        for operation in layer.operations:
            for one in operation.kernels:
                if one.kernel == operation.served_by and not one.objections:
                    break
                for reason in one.objections:
                    kernels, layers = found.setdefault(reason, ({}, {}))
                    kernels[one.kernel], layers[layer.name] = None, None
    return {reason: (list(kernels), list(layers)) for reason, (kernels, layers) in found.items()}


def main() -> None:
    """The entry point of the script `dsl-backend`."""
    app()


if __name__ == "__main__":
    main()
