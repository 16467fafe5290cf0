/* The header is C: a library without C++ includes it as it is. */
#include "validate/kernels.h"

static int32_t prune(const hae_prune_arguments* arguments, const hae_context* context) {
  (void)context;
  return arguments->sums.data == 0 ? HAE_DONE : HAE_UNSUPPORTED;
}

static const hae_kernels table = {.abi = HAE_KERNELS_ABI, .accumulation = HAE_FLOAT64, .name = "none", .prune = prune};

const hae_kernels* hae_kernels_table(void) { return &table; }
