# SPDX-License-Identifier: Apache-2.0
"""The sampler for SM90 and SM100: temperature, min-p, top-k, top-p and the draw in one launch, a cluster for each row.

Or in two, where rows have top-p alone: see `Finish`.

1. The first pass finds the row's maximum (`row`). It keeps the maximum of each thread and of each block of 512 logits.
   For a row without top-k and min-p it also sums the probabilities of each block.
2. `row_max`: groups of threads share their maxima across the cluster. Groups have no logit in common, so the k-th
   largest of the 256 group maxima bounds the row's k-th largest logit from below.
3. `candidates`: only logits of a thread and a block that both have one above that bound are read again. The candidates
   go to the cluster's first CTA, which applies the filters and draws. Min-p finds its candidates the same way.
4. `full_row`: a row without top-k and min-p is drawn from the sums of its blocks, and one block is read again. Top-p
   accepts the token by the sums of the blocks that have a likelier one, or reads these blocks again where their sums do
   not decide it; and once more for each token that it does not accept. Rows with too many candidates are sampled so
   too, after a pass that sums them; `radix_select` finds their k-th largest logit.
5. Where what the filters keep is returned, `candidates` finds it by the same list. `last_kept` searches where top-p
   ends in rows without one, and makes such a list of the tokens there.

The same instructions serve SM90 and SM100.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from dsl_backend.primitives import dependent_launch
from dsl_backend.sampling import fixed_point as constants
from dsl_backend.sampling.configs import ClusterConfig
from dsl_backend.sampling.cute import fixed_point, smem
from dsl_backend.sampling.cute.args import SampleArgs
from dsl_backend.sampling.cute.candidates import CandidateSampler
from dsl_backend.sampling.cute.cluster import Cluster
from dsl_backend.sampling.cute.full_row import FullRowSampler
from dsl_backend.sampling.cute.last_kept import LastKept
from dsl_backend.sampling.cute.likeliest import Likeliest
from dsl_backend.sampling.cute.philox import random_bits
from dsl_backend.sampling.cute.radix_select import RadixSelect
from dsl_backend.sampling.cute.row import LIMIT, RANDOM_BITS, Logits, Row, RowReader, top_k_of, write_kept, write_token
from dsl_backend.sampling.cute.row_max import NO_ID, RowMax
from dsl_backend.sampling.cute.smem import SharedStorage
from dsl_backend.sampling.spec import LogprobsMode

NUMERIC = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}


# In SampleArgs.pending, of a row that is done.
NOTHING = -1


@dataclass(frozen=True, kw_only=True)
class SampleKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype, token_dtype, k_dtype: type names of logits, tokens and top_k.
        logprobs_mode: the values of the likeliest tokens; None where they are not returned.
        keeps: what the filters keep is written.
        config: threads, CTAs, vectors.
    """

    dtype: str
    token_dtype: str
    k_dtype: str
    logprobs_mode: LogprobsMode | None = None
    keeps: bool = False
    config: ClusterConfig


class Sample:
    """Writes tokens [rows] from logits [rows, vocab]; a CTA has 64 registers a thread."""

    def __init__(self, key: SampleKey):
        config = key.config
        self.config = config
        self.cluster = Cluster(config.cluster)
        mode = key.logprobs_mode
        self.returns_likeliest, self.keeps = mode is not None, key.keeps
        self.reader = RowReader(config, self.cluster, NUMERIC[key.dtype], exp_sums=mode is LogprobsMode.RAW_LOGPROBS)
        self.radix = RadixSelect(config, self.cluster, self.reader)
        self.row_max = RowMax(config, self.cluster, self.reader)
        self.candidates = CandidateSampler(config, self.cluster, self.reader, narrows=mode is None, keeps=key.keeps)
        last_kept = LastKept(config, self.cluster, self.reader, self.radix, self.candidates) if key.keeps else None
        self.full_row = FullRowSampler(config, self.cluster, self.reader, self.radix, last_kept)
        self.likeliest = Likeliest(config, self.cluster, self.reader, self.candidates, self.full_row, self.radix, mode)
        self.finish = Finish(key) if config.finish_cluster else None

    @cute.jit
    def __call__(self, stream, *tensors):
        config = self.config
        args = SampleArgs.of(tensors, self.returns_likeliest, config.finish_cluster > 0, self.keeps)
        launch_rows(self.kernel(args), config, args, stream)
        if cutlass.const_expr(config.finish_cluster):
            self.finish.launch(args, stream)

    @cute.kernel
    def kernel(self, args: SampleArgs):
        storage = smem.allocate(self.config)
        thread = cute.arch.thread_idx()[0]
        self.radix.clear(storage)
        if thread == 0:
            storage.sCount[0] = cutlass.Uint32(0)
            storage.sCount[1] = cutlass.Uint32(NO_ID)
        if cutlass.const_expr(self.cluster.ctas > 1):
            cute.arch.cluster_arrive()
        # The previous kernel on the stream may run until here.
        dependent_launch.wait()

        index = cute.arch.block_idx()[0]
        vocab = args.logits.shape[1]
        logits = logits_of(args, index)
        if cutlass.const_expr(self.config.finish_cluster):
            if self.cluster.rank() == 0 and thread == 0:
                args.pending[index, 0] = cutlass.Int64(NOTHING)
        if cute.arch.warp_idx() == self.config.warps - 1:
            # One warp computes the random bits for all, before it waits for logits.
            bits = random_bits(args.seeds[index], args.positions[index])
            if cute.arch.lane_idx() == 0:
                storage.sResult[RANDOM_BITS] = bits
        temperature = args.temperature[index]
        is_random = temperature >= cutlass.Float32(constants.GREEDY_TEMPERATURE)
        scale = fixed_point.scale_of(temperature if is_random else cutlass.Float32(1.0))
        top_k, min_prob = top_k_of(args, index), fixed_point.min_p_threshold(args.min_p[index])
        # By a vote, so that it is not computed anew for every block.
        by_block = cutlass.Boolean(cute.arch.vote_any_sync(is_random and top_k == vocab and min_prob == 0))
        # At temperature 1 the sums of blocks are those of exponentials too (`FullRowSampler.sample`).
        has_exp_sums = cutlass.Boolean(cute.arch.vote_any_sync(not by_block or temperature != 1.0))
        thread_max, exp_sum = self.reader.read(storage, logits, scale, by_block, has_exp_sums)
        thread_max = fixed_point.canonical(thread_max)
        self.row_max.share_group_max(storage, thread_max)
        row_max, lowest_group_max = self.row_max.reduce(storage)
        self.likeliest.share_exp_sum(storage, exp_sum, thread_max, row_max)

        row = Row(
            logits=logits,
            scale=scale,
            row_max=row_max,
            reference=fixed_point.finite(row_max),
            # Loaded anew: kept from before the pass, registers spilled (ptxas 13.0).
            min_prob=fixed_point.min_p_threshold(args.min_p[index]),
            args=args,
            index=index,
        )
        if cutlass.const_expr(self.returns_likeliest):
            maxima = (thread_max, lowest_group_max)
            self.sample_and_rank(storage, row, args, index, is_random, maxima)
        elif row_max == -cutlass.Float32.inf:
            if self.cluster.rank() == 0 and thread == 0:
                write_token(row, 0)
                if cutlass.const_expr(self.keeps):
                    write_kept(row, cutlass.Uint64(0), cutlass.Uint32(0), 0)
        elif is_random:
            if cutlass.const_expr(self.config.finish_cluster):
                self.draw_once(storage, row)
            else:
                self.sample(storage, row, thread_max, lowest_group_max)
        else:
            self.row_max.argmax(storage, row, thread_max)

    @cute.jit
    def sample(self, storage: SharedStorage, row: Row, thread_max, lowest_group_max):
        """Draw a token, from the candidates where they are few enough."""
        count = self.candidates.collect(storage, row, thread_max, lowest_group_max)
        if count <= self.config.max_candidates:
            self.candidates.sample(storage, row, count)
        else:
            self.full_row.sample(storage, row)

    @cute.jit
    def draw_once(self, storage: SharedStorage, row: Row):
        """Draw a token, and leave it to the second launch whether top-p keeps it, where that is not sure."""
        thread, first_block = cute.arch.thread_idx()[0], self.reader.block(row.vocab, 0)
        token_id, is_kept = self.full_row.draw_once(storage, row)
        if self.cluster.rank() == 0 and thread == 0:
            if is_kept:
                write_token(row, token_id)
            else:
                pending = row.args.pending
                pending[row.index, 0] = cutlass.Int64(token_id)
                pending[row.index, 1] = cutlass.Int64(storage.sResult[LIMIT])
                pending[row.index, 2] = cutlass.Int64(row.row_max.bitcast(cutlass.Uint32))
        if not is_kept:
            count = cutlass.min(self.reader.blocks(row.vocab), row.args.block_max.shape[1] - first_block)
            for index in cutlass.range(thread, count, self.config.threads, unroll=1):
                row.args.block_max[row.index, first_block + index] = storage.sBlockMax[index]

    @cute.jit
    def sample_and_rank(self, storage: SharedStorage, row: Row, args: SampleArgs, index, is_random, maxima):
        """Draw a token, and write it with its rank and the likeliest tokens.

        Args:
            maxima: of this thread, and the lowest of the groups'.
        """
        wanted = cutlass.max(cutlass.Int32(args.top_ids.shape[1]) - 1, 1)
        token_id, x, count = cutlass.Int32(0), row.row_max, cutlass.Uint32(0)
        has_candidates = is_random and (self.candidates.is_bounded_by_top_k(row) or row.min_prob > 0)
        is_counted = is_random and not has_candidates
        if row.row_max == -cutlass.Float32.inf:
            if self.cluster.rank() == 0 and cute.arch.thread_idx()[0] == 0:
                write_token(row, 0)
            # The sums of exponentials are there.
            self.cluster.barrier()
        else:
            count = self.likeliest.collect(storage, row, *maxima, wanted, has_candidates)
            fits = count <= self.config.max_candidates
            is_counted = is_counted or not fits
            if is_random and not is_counted:
                self.candidates.sample(storage, row, count)
                if self.cluster.rank() == 0:
                    token_id = cutlass.Int32(storage.sCandId[storage.sIndex[0]])
                    x = cutlass.Float32(storage.sCandX[storage.sIndex[0]])
            else:
                if is_random:
                    token_id = self.full_row.sample(storage, row)
                    x = fixed_point.canonical(self.reader.load_logit(row.logits, token_id))
                else:
                    token_id = self.row_max.argmax(storage, row, maxima[0])
                if not fits:
                    self.likeliest.select_exactly(storage, row, wanted)
                    count = cutlass.Uint32(wanted)
                if is_counted:
                    self.likeliest.share_rank(storage, row, x)
                if self.cluster.rank() == 0:
                    self.candidates.gather(storage)
                self.cluster.barrier()
        if self.cluster.rank() == 0:
            rank = self.likeliest.rank(storage, row, x, cutlass.Int32(count), is_counted)
            self.likeliest.write(storage, row, args, index, token_id, rank, cutlass.Int32(count))


class Finish:
    """The second launch, of top-p alone: it draws until top-p keeps the token, in the rows where that is not decided.

    About one row of eight is left (1 - top_p of them at least), and it is read once or twice more. With the CTAs that
    fit all rows, the slowest row decides how long a launch takes; here many CTAs share each of the rows that are left.
    """

    def __init__(self, key: SampleKey):
        config = self.config = key.config.finishing
        self.cluster = Cluster(config.cluster)
        self.reader = RowReader(config, self.cluster, NUMERIC[key.dtype])
        self.full_row = FullRowSampler(
            config, self.cluster, self.reader, RadixSelect(config, self.cluster, self.reader)
        )

    @cute.jit
    def launch(self, args: SampleArgs, stream):
        launch_rows(self.kernel(args), self.config, args, stream)

    @cute.kernel
    def kernel(self, args: SampleArgs):
        storage = smem.allocate(self.config)
        dependent_launch.wait()
        index = cute.arch.block_idx()[0]
        token_id = cutlass.Int32(args.pending[index, 0])
        if token_id != NOTHING:
            self.draw(storage, args, index, token_id)

    @cute.jit
    def draw(self, storage: SharedStorage, args: SampleArgs, index, token_id):
        """Draw again from a row while top-p does not keep its token, and write the token."""
        thread, logits = cute.arch.thread_idx()[0], logits_of(args, index)
        first_block, blocks = self.reader.block(logits.vocab, 0), self.reader.blocks(logits.vocab)
        for i in cutlass.range(thread, blocks, self.config.threads, unroll=1):
            block_max = -cutlass.Float32.inf
            if first_block + i < args.block_max.shape[1]:
                block_max = args.block_max[index, first_block + i]
            storage.sBlockMax[i] = block_max
        if thread == 0:
            storage.sResult[LIMIT] = cutlass.Uint64(args.pending[index, 1])
        # The shared memory of a CTA may be written once the CTA runs.
        self.cluster.barrier()
        row_max = cutlass.Uint32(args.pending[index, 2]).bitcast(cutlass.Float32)
        row = Row(
            logits=logits,
            scale=fixed_point.scale_of(args.temperature[index]),
            row_max=row_max,
            reference=fixed_point.finite(row_max),
            min_prob=cutlass.Uint64(0),
            args=args,
            index=index,
        )
        bound = fixed_point.canonical(self.reader.load_logit(logits, token_id))
        token_id = self.full_row.draw_until_accepted(storage, row, cutlass.Boolean(False), bound, token_id, drawn=True)
        if self.cluster.rank() == 0 and thread == 0:
            write_token(row, token_id)


def launch_rows(kernel, config: ClusterConfig, args: SampleArgs, stream) -> None:
    """Launch a kernel that has a cluster for each row, with its arguments bound."""
    kernel.launch(
        grid=(args.logits.shape[0], config.cluster, 1),
        block=(config.threads, 1, 1),
        cluster=(1, config.cluster, 1) if config.cluster > 1 else None,
        min_blocks_per_mp=config.ctas_per_sm,
        preferred_smem_carveout=config.smem_percent,
        use_pdl=True,
        stream=stream,
    )


def logits_of(args: SampleArgs, index) -> Logits:
    """Of a row."""
    return Logits(args.logits.iterator + 0, cutlass.Int64(index) * args.logits.stride[0], args.logits.shape[1])
