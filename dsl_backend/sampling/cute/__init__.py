# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL sampler for SM90 and SM100."""
