# SPDX-License-Identifier: Apache-2.0
"""GEMMs in CuTe DSL with bias, gated activation and residual; linear layers use them."""
