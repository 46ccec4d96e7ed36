# SPDX-License-Identifier: Apache-2.0
"""The sampler for SM90 and SM100: temperature, min-p, top-k, top-p and the draw in one launch, a cluster for each row.

1. `row_max`: the first pass keeps one value for each thread, its maximum logit. Groups of threads share their maxima
   across the cluster. Groups have no logit in common, so the k-th largest of the 256 group maxima bounds the row's k-th
   largest logit from below.
2. `candidates`: only threads with a logit above that bound read their logits again. The candidates go to the cluster's
   first CTA, which applies the filters and draws. Min-p finds its candidates the same way.
3. `full_row`: rows with too many candidates, or without a filter that bounds them, are read again as a whole.
   `radix_select` finds the pivots of top-k and top-p. Then the kept probabilities of each warp's segment are summed,
   and the segment of the draw is searched.

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
from dsl_backend.sampling.cute.philox import random_bits
from dsl_backend.sampling.cute.radix_select import RadixSelect
from dsl_backend.sampling.cute.row import Row, RowReader, Segment
from dsl_backend.sampling.cute.row_max import NO_ID, RowMax
from dsl_backend.sampling.cute.scan import WARP
from dsl_backend.sampling.cute.smem import SharedStorage

NUMERIC = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}
# Index of the random bits in SharedStorage.sResult.
RANDOM_BITS = 3


@dataclass(frozen=True, kw_only=True)
class SampleKey:
    """All that the kernel's code depends on.

    Attributes:
        dtype, token_dtype, k_dtype: type names of logits, tokens and top_k.
        config: threads, CTAs, vectors.
    """

    dtype: str
    token_dtype: str
    k_dtype: str
    config: ClusterConfig


class Sample:
    """Writes tokens [rows] from logits [rows, vocab]; a CTA has 64 registers a thread."""

    def __init__(self, key: SampleKey):
        config = key.config
        self.config = config
        self.cluster = Cluster(config.cluster)
        self.reader = RowReader(config, NUMERIC[key.dtype])
        self.radix = RadixSelect(config, self.cluster, self.reader)
        self.row_max = RowMax(config, self.cluster, self.reader)
        self.candidates = CandidateSampler(config, self.cluster, self.reader)
        self.full_row = FullRowSampler(config, self.cluster, self.reader, self.radix)

    @cute.jit
    def __call__(self, stream, *tensors):
        args = SampleArgs(*tensors)
        config = self.config
        self.kernel(args).launch(
            grid=(args.logits.shape[0], config.cluster, 1),
            block=(config.threads, 1, 1),
            cluster=(1, config.cluster, 1) if cutlass.const_expr(config.cluster > 1) else None,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=config.smem_percent,
            use_pdl=True,
            stream=stream,
        )

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
        segment = self.segment(args.logits, index)
        if cute.arch.warp_idx() == self.config.warps - 1:
            # One warp computes the random bits for all, before it waits for logits.
            bits = random_bits(args.seeds[index], args.positions[index])
            if cute.arch.lane_idx() == 0:
                storage.sResult[RANDOM_BITS] = bits
        temperature = args.temperature[index]
        is_random = temperature >= cutlass.Float32(constants.GREEDY_TEMPERATURE)
        temperature = temperature if is_random else cutlass.Float32(1.0)
        thread_max = fixed_point.scaled_logit(self.reader.thread_max(segment), temperature)
        self.row_max.share_group_max(storage, thread_max)
        row_max, lowest_group_max = self.row_max.reduce(storage)

        row = self.row(args, index, segment, temperature, row_max, storage)
        token = args.tokens.iterator + index
        if row_max == -cutlass.Float32.inf:
            if self.cluster.rank() == 0 and thread == 0:
                fixed_point.store_token(token, 0)
        elif is_random:
            self.sample(storage, row, thread_max, lowest_group_max, token)
        else:
            self.row_max.argmax(storage, row, thread_max, token)

    @cute.jit
    def segment(self, mLogits: cute.Tensor, index) -> Segment:
        """The part of the row that this thread's warp reads."""
        vocab = mLogits.shape[1]
        warps, vector = self.config.warps, self.config.vector
        warp = self.cluster.rank() * warps + cute.arch.warp_idx()
        steps = cute.ceil_div(vocab, self.config.cluster * warps * WARP * vector)
        begin = warp * steps * (WARP * vector)
        end = cutlass.min(begin + steps * (WARP * vector), vocab)
        offset = cutlass.Int64(index) * mLogits.stride[0]
        return Segment(base=mLogits.iterator + 0, offset=offset, begin=begin, end=end, steps=steps)

    @cute.jit
    def row(self, args: SampleArgs, index, segment: Segment, temperature, row_max, storage: SharedStorage) -> Row:
        """The row with its parameters; those out of range are off."""
        vocab = args.logits.shape[1]
        top_k = cutlass.Int64(args.top_k[index])
        has_top_k = top_k > 0 and top_k < vocab
        top_p = args.top_p[index]
        return Row(
            segment=segment,
            vocab=vocab,
            temperature=temperature,
            row_max=row_max,
            top_k=cutlass.Int32(top_k) if has_top_k else vocab,
            min_prob=fixed_point.min_p_threshold(args.min_p[index]),
            top_p=top_p if top_p < 1.0 else cutlass.Float32(1.0),
            random_bits=cutlass.Uint64(storage.sResult[RANDOM_BITS]),
        )

    @cute.jit
    def sample(self, storage: SharedStorage, row: Row, thread_max, lowest_group_max, token: cute.Pointer):
        """Draw a token, from the candidates where they are few enough."""
        count = self.candidates.collect(storage, row, thread_max, lowest_group_max)
        if count <= self.config.max_candidates:
            self.candidates.sample(storage, row, count, token)
        else:
            self.full_row.sample(storage, row, token)
