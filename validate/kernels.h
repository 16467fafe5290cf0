/* What a library of attention and eviction kernels offers to `hae validate --kernels LIB.so`.
 *
 * The library exports one function, `hae_kernels_table`, that returns a table of function pointers. Any of them may
 * be null; what is there is held to the definitions below. docs/validate.md says how, and derives every bound.
 *
 * Common to all operations:
 *   - Arrays have strides, in elements, none negative; the innermost is 1. What lies between elements, before the
 *     first and after the last belongs to somebody else: reading it gives NaN, writing it is a fault.
 *   - An absent array has a null pointer. An absent output is not asked for. A kernel that does not serve what is
 *     asked, say a type, a layout or an absent input, returns HAE_UNSUPPORTED: the case is counted and not failed.
 *   - Inputs stay as they are. Equal calls give equal bytes, whatever was called in between.
 *   - Order of eviction: the lower score first, among equal scores the lower position. +0 and -0 are equal, a NaN
 *     ranks below everything, and all NaNs are equal.
 *   - lengths say how many slots of a lane are in use; the slots beyond hold anything, NaN among it.
 */
#ifndef HAE_KERNELS_H
#define HAE_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with every change of this file that an old library would not survive. */
#define HAE_KERNELS_ABI 1

enum { HAE_FLOAT32 = 0, HAE_FLOAT16 = 1, HAE_BFLOAT16 = 2, HAE_FLOAT64 = 3, HAE_INT32 = 4, HAE_INT64 = 5, HAE_UINT8 = 6 };

/* What an operation returns; anything else is a failure of the case. */
enum { HAE_DONE = 0, HAE_UNSUPPORTED = 1 };

#define HAE_MAX_RANK 4

typedef struct hae_array {
  void* data; /* the first element; null: absent */
  int32_t dtype;
  int32_t rank;
  int64_t shape[HAE_MAX_RANK];
  int64_t strides[HAE_MAX_RANK]; /* in elements */
} hae_array;

/* Where a call runs. */
typedef struct hae_context {
  int32_t device_type; /* DLPack's: 1 CPU, 2 CUDA, 10 ROCm */
  int32_t device;
  void* stream;
  void* workspace; /* of workspace_bytes, aligned to 256, contents undefined; null when there are none */
  int64_t workspace_bytes;
} hae_context;

/* How query heads become one value a row: over the query heads of the lane. */
enum { HAE_MEAN = 0, HAE_SUM = 1, HAE_MAX = 2 };

/* Cumulative attention. The prompt's rows at once, or the one row of a decode step: rows = 1.
 *
 *   value_ij    = mean over the lane's query heads h of probabilities[h, i, j]     (or their sum, or maximum)
 *   scores[j]  += sum over counted rows i of value_ij                              HAE Eq. (5)
 *   largest[j]  = max(largest[j], max over counted rows i of value_ij)             DAP's row maximum, HAE Eq. (2)
 *
 * Query heads belong to lanes in order: lane l holds heads l * g .. l * g + g - 1, g = query_heads / lanes.
 * A slot beyond lengths keeps its score. A NaN probability makes that slot's score NaN and no other. */
typedef struct hae_add_scores_arguments {
  hae_array probabilities; /* [items, query_heads, rows, slots] float32, float16, bfloat16 */
  hae_array lengths;       /* [items] int64; absent: all slots */
  hae_array counted;       /* [items, rows] uint8, 1 where a row counts: text, not padding; absent: all rows */
  int32_t reduction;
  hae_array scores;  /* in and out: [items, lanes, slots] float32 or float64 */
  hae_array largest; /* in and out: [items, lanes, slots], as scores; may be absent */
} hae_add_scores_arguments;

/* The lowest `counts` eligible slots of each lane by the order of eviction, or all when there are fewer.
 * -1 fills the rest of chosen; what fills the rest of chosen_scores is not looked at. */
typedef struct hae_select_lowest_arguments {
  hae_array scores;        /* [lanes, slots] float32, float16, bfloat16, float64 */
  hae_array positions;     /* [lanes, slots] int64, distinct, in any order; absent: the slot's number */
  hae_array eligible;      /* [lanes, slots] uint8; absent: all */
  hae_array lengths;       /* [lanes] int64; absent: all slots */
  hae_array counts;        /* [lanes] int64, 0 .. most */
  int32_t ordered;         /* 1: chosen in the order of eviction; 0: in any order */
  hae_array chosen;        /* out: [lanes, most] int64, slots */
  hae_array chosen_scores; /* out: [lanes, most], as scores; may be absent */
} hae_select_lowest_arguments;

/* Selection straight from rows of attention, as SnapKV and H2O kernels fuse it: the slots that add_scores with mean,
 * from scores 0, and select_lowest would choose, positions being slot numbers. A choice may differ where two scores
 * are closer than the bound of their rounding errors, and nowhere else. */
typedef struct hae_select_from_rows_arguments {
  hae_array probabilities; /* [lanes, query_heads of a lane, rows, slots] */
  hae_array lengths;       /* [lanes] int64; absent: all slots */
  hae_array counts;        /* [lanes] int64, 0 .. most */
  hae_array chosen;        /* out: [lanes, most] int64, in the order of eviction */
  hae_array chosen_scores; /* out: [lanes, most] float32; may be absent */
} hae_select_from_rows_arguments;

/* Dual-Attention Pruning, HAE Eq. (1)-(3). Over the candidates j of each scope, those with scope[j] equal:
 *
 *   A_V = sum of sums[j]        evicted[j] = 1 iff  sums[j] < r * A_V  and  largest[j] < alpha    (both strict)
 *
 * Positions below sinks count in A_V and are never evicted. */
typedef struct hae_prune_arguments {
  hae_array sums;    /* [items, tokens] float32 or float64, A_j */
  hae_array largest; /* [items, tokens], as sums */
  hae_array scope;   /* [items, tokens] int32; -1: not a candidate */
  int64_t sinks;
  double r;
  double alpha;
  hae_array evicted; /* out: [items, tokens] uint8, 0 for all others */
} hae_prune_arguments;

/* Removes tokens and closes the gaps; what is kept keeps its order and every bit. An output array may be its input
 * (equal pointers: in place); else the two do not overlap. Slots of an output beyond kept are not looked at. */
typedef struct hae_compact_arguments {
  hae_array keep;    /* [lanes, slots] uint8 */
  hae_array lengths; /* [lanes] int64; absent: all slots */
  hae_array keys, values;      /* [lanes, slots, head_dim]; each may be absent */
  hae_array positions, scores; /* [lanes, slots] int64, and float32 or float64; each may be absent */
  hae_array keys_out, values_out, positions_out, scores_out;
  hae_array kept; /* out: [lanes] int64 */
} hae_compact_arguments;

/* Attention of one new query in each query head over a cache from which tokens were evicted.
 *
 *   z_j = scale * q . k_j    a_j = exp(z_j - max z) / sum of exp(z - max z)    o = sum of a_j v_j
 *
 * Query head h reads KV head h / (query_heads / kv_heads): groups are interleaved, never tiled. A slot takes part
 * when it is below its lane's length, visible, and, with window > 0, when query_position - position < window.
 * Without such a slot a row's probabilities and output are 0 and its log_sum_exp is -infinity. A row with a logit
 * that is NaN has a NaN output; its probabilities and log_sum_exp are not looked at. Probabilities and sums of slots
 * that do not take part are 0 below the length and not looked at beyond it. */
typedef struct hae_attend_arguments {
  hae_array queries;         /* [items, query_heads, head_dim] float32, float16, bfloat16 */
  hae_array keys, values;    /* [items, kv_heads, slots, head_dim]; paged: [pages, kv_heads, page_size, head_dim] */
  hae_array block_table;     /* [items, blocks] int32: page of slots b * page_size ..; absent: not paged */
  hae_array lengths;         /* [items, kv_heads] int64; absent: all slots; never absent when paged */
  hae_array visible;         /* [items, kv_heads, slots] uint8; absent: all */
  hae_array positions;       /* [items, kv_heads, slots] int64; absent: the slot's number */
  hae_array query_positions; /* [items] int64; absent without a window */
  int64_t window;            /* 0: none */
  float scale;
  hae_array probabilities; /* out: [items, query_heads, slots] as queries, or float32 */
  hae_array output;        /* out: [items, query_heads, head_dim] as queries */
  hae_array log_sum_exp;   /* out: [items, query_heads] float32, natural logarithm of sum of exp(z) */
  hae_array sums;          /* out: [items, kv_heads, slots] float32, probabilities summed over the group's heads */
} hae_attend_arguments;

enum {
  HAE_ADD_SCORES = 0,
  HAE_SELECT_LOWEST = 1,
  HAE_SELECT_FROM_ROWS = 2,
  HAE_PRUNE = 3,
  HAE_COMPACT = 4,
  HAE_ATTEND = 5
};

/* Memory of a device, when arrays have to lie there; all null: arrays lie in the process's own memory. Functions that
 * return int32_t return 0 when they succeed. Copies may be asynchronous in the stream: synchronize follows each. */
typedef struct hae_memory {
  void* (*allocate)(int64_t bytes); /* aligned to 256; null: there is no more */
  void (*release)(void* memory);
  int32_t (*copy_in)(void* device, const void* host, int64_t bytes, void* stream);
  int32_t (*copy_out)(void* host, const void* device, int64_t bytes, void* stream);
  int32_t (*synchronize)(void* stream);
  int32_t device_type;
  int32_t device;
  void* stream;       /* of calls and copies */
  void* other_stream; /* null: calls in two streams at once are not tried */
} hae_memory;

typedef struct hae_kernels {
  int32_t abi;          /* HAE_KERNELS_ABI */
  int32_t accumulation; /* HAE_FLOAT32 or HAE_FLOAT64: the narrowest type that a sum is kept in */
  const char* name;
  hae_memory memory;
  /* Bytes of work space of a call; null: none. */
  int64_t (*workspace_bytes)(int32_t operation, const void* arguments);
  int32_t (*add_scores)(const hae_add_scores_arguments*, const hae_context*);
  int32_t (*select_lowest)(const hae_select_lowest_arguments*, const hae_context*);
  int32_t (*select_from_rows)(const hae_select_from_rows_arguments*, const hae_context*);
  int32_t (*prune)(const hae_prune_arguments*, const hae_context*);
  int32_t (*compact)(const hae_compact_arguments*, const hae_context*);
  int32_t (*attend)(const hae_attend_arguments*, const hae_context*);
} hae_kernels;

/* The one symbol a library exports; the table lives as long as the library. */
const hae_kernels* hae_kernels_table(void);

#ifdef __cplusplus
}
#endif

#endif /* HAE_KERNELS_H */
