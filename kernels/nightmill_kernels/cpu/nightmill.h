// The library's C interface: plain structs, no torch, no OpenMP headers. The Python side mirrors them in library.py.
//
// Numerics, all functions: values are widened to fp32, summed in fp32 and rounded once to the output's type. (One
// exception: where the processor multiplies bf16 directly, attention rounds its weights to bf16 before the second
// product.) Each output row is summed in an order that depends on that row alone, so a result never depends on the
// other rows of a call, on the number of threads or on how work was split among them. Different instruction sets differ
// in the last bits, except for nm_argmax and nm_draw, which do not differ at all.
#ifndef NIGHTMILL_H
#define NIGHTMILL_H

#include <stdint.h>

#define NM_ABI 8
#define NM_EXPORT __attribute__((visibility("default")))

enum nm_dtype { NM_F32 = 0, NM_BF16 = 1 };

enum nm_status {
  NM_OK = 0,
  NM_UNSUPPORTED = 1,     // shape or dtype this library does not take: the caller has a reference for it
  NM_BAD_STARTS = 2,      // query_starts do not ascend within [0, num_tokens]
  NM_BAD_CONTEXT = 3,     // a context does not fit its page table
  NM_BAD_PAGE = 4,        // a page id outside the pool
  NM_BAD_SLOT = 5,        // a slot outside the pool
  NM_BAD_POSITION = 6,    // a position outside the cos_sin table
  NM_NO_MEMORY = 7,
  NM_BAD_GROUP = 8,       // a group's sequences do not share its pages, or one is in two groups, or is no decode
  NM_BAD_ROW = 9,         // a row outside the packed weight
  NM_BAD_KEEP = 10,       // rows to keep do not ascend within those given
};

// Runs fn(data) on each of num_threads threads at once and waits: the signature of libgomp's GOMP_parallel.
typedef void (*nm_parallel_fn)(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags);

NM_EXPORT int nm_abi(void);
NM_EXPORT void nm_set_parallel(nm_parallel_fn parallel);  // NULL: everything runs on the calling thread

// Pools are [N, Hk, page_size, D], pool_stride elements between pages. What lies within a page and head:
//
//   plain   [page_size][D]
//   paired  K [page_size / 16][D / 2][16 keys][2], V [page_size / 16][8][D][2 keys]: as instructions take them that
//           multiply two bf16 at a time, so that nothing is packed when it is read
//
// This says which of the two every function of this library takes and makes of a pool; 1: paired.
NM_EXPORT int nm_paired(int dtype, int head_dim, int page_size);

struct nm_attention {
  const void *q;                // [T, H, D], q_stride elements between tokens
  const void *k_pool, *v_pool;  // see nm_paired
  void *out;                    // [T, H, D], out_stride elements between tokens
  const int32_t *query_starts;  // [S + 1]
  const int32_t *context_lens;  // [S]
  const int32_t *page_tables;   // [S, table_width]
  const int32_t *group_starts;  // [num_groups + 1]
  const int32_t *group_members; // [num_members] sequences, all with one query token
  const int32_t *group_pages;   // [num_groups]: the first so many page ids of its members' tables are the same
  int64_t q_stride, out_stride, pool_stride;
  int64_t num_tokens, num_pages;
  int32_t num_sequences, table_width, heads, kv_heads, head_dim, page_size;
  int32_t dtype;                // of q, pools and out
  int32_t window;               // 0: none
  int32_t threads;
  int32_t num_groups, num_members;
  float scale;
  float softcap;                // 0: none
};
NM_EXPORT int nm_paged_attention(const struct nm_attention *call);

struct nm_norm {
  const void *x;         // [outer, inner, dim], x_stride elements between outer rows
  void *residual;        // like x but contiguous, or NULL; x is added to it in place
  const void *weight;    // [dim]
  void *out;             // [outer, inner, dim], out_stride elements between outer rows; may be x
  int64_t outer, inner, dim, x_stride, out_stride;
  int32_t dtype, threads;
  float eps, weight_offset;
};
NM_EXPORT int nm_rms_norm(const struct nm_norm *call);

struct nm_rope {
  void *q, *k;           // [T, H, D], [T, Hk, D], rotated in place when cos_sin is given
  const void *v;         // [T, Hk, D]
  void *k_pool, *v_pool; // see nm_paired; written when slots is given
  const void *positions; // int32 or int64 [T]
  const float *cos_sin;  // [max_len, rot]: cosines, then sines; NULL: no rotation
  const int64_t *slots;  // [T], negative: skip; NULL: nothing is stored
  int64_t q_stride, k_stride, v_stride, pool_stride;
  int64_t num_tokens, num_pages, max_len;
  int32_t heads, kv_heads, head_dim, rot, page_size, dtype, wide_positions, threads;
};
NM_EXPORT int nm_rope_store(const struct nm_rope *call);

enum nm_gate { NM_SILU = 0, NM_GELU_TANH = 1 };
NM_EXPORT int nm_gated_mul(const void *gate_up, void *out, int64_t rows, int64_t width, int64_t stride, int dtype,
                           int gate, int threads);

NM_EXPORT int nm_argmax(const void *logits, int32_t *out, int64_t rows, int64_t vocab, int64_t stride, int dtype,
                        int threads);

enum { NM_MAX_VOCAB = 1 << 20 };
struct nm_draw {
  const void *logits;        // [rows, vocab], stride elements between rows
  int32_t *out;              // [rows]; -1: no finite largest logit
  const float *temperature;  // [rows] 0: greedy
  const float *min_p;        // [rows] 0: all
  const int32_t *top_k;      // [rows] 0: all
  const float *top_p;        // [rows] 1: all
  const int64_t *seed;       // [rows] the bits of an unsigned number
  const int64_t *position;   // [rows]
  int64_t rows, vocab, stride;
  int32_t dtype, threads;
};
NM_EXPORT int nm_draw(const struct nm_draw *call);

enum { NM_NO_GATE = -1 };
// A linear layer, packed: x Wᵀ + b; with a gate, of 2 · outputs rows of W, gate(first half) · second half.
struct nm_linear {
  void *packed;             // nm_linear_bytes of it, aligned to 64
  int64_t outputs, inputs;  // an output row and an input row have so many elements
  int32_t dtype, gate;      // of weights, bias, inputs and outputs; NM_NO_GATE or an nm_gate
  int32_t has_bias;
};
NM_EXPORT int64_t nm_linear_bytes(const struct nm_linear *layer);  // -1: unsupported
// Fills layer->packed: weight [outputs or twice as many, inputs], stride elements between rows; bias like it or NULL.
NM_EXPORT int nm_linear_pack(const struct nm_linear *layer, const void *weight, int64_t stride, const void *bias,
                             int threads);
// out [rows, outputs] of x [rows, inputs], strides in elements.
NM_EXPORT int nm_linear(const struct nm_linear *layer, const void *x, int64_t x_stride, void *out, int64_t out_stride,
                        int64_t rows, int threads);
// out [count, inputs], contiguous: those rows of the weight, int32 or int64 numbers.
NM_EXPORT int nm_linear_rows(const struct nm_linear *layer, const void *rows, int64_t count, int wide_rows, void *out,
                             int threads);

// A linear layer in int8: x Wᵀ + b; with a gate, of 2 · outputs rows of W, gate(first half) · second half. P panels of
// 64 columns: the outputs in order; with a gate 16 of the gate, the 16 that it gates, the next 16 of the gate, …
struct nm_int8_layer {
  const uint8_t *panels;    // [P, 8 · ceil(inputs / 32), 64, 4] a weight's int8, in ±127, + 128; 128 where there is none
  const float *scale;       // [64 P] a weight is its int8 times this
  const float *bias;        // [64 P]
  int64_t outputs, inputs;  // an output row and an input row have so many elements
  int32_t gate;             // NM_NO_GATE or an nm_gate
};
struct nm_int8_call {
  const struct nm_int8_layer *layer;
  const void *x;            // [rows, inputs], x_stride elements between rows
  void *out;                // [rows, outputs]
  int64_t x_stride, rows;
  int32_t dtype, threads;
};
NM_EXPORT int nm_linear_int8(const struct nm_int8_call *call);

struct nm_linear_call {  // the arguments of nm_linear
  const struct nm_linear *layer;
  const void *x;
  void *out;
  int64_t x_stride, out_stride, rows;
  int32_t threads;
};
// In place: row i of x becomes row index[i], for each of `count`. What lies behind them stays as it was.
struct nm_keep {
  void *x;               // [rows, width], stride bytes between rows
  const int32_t *index;  // [count], each larger than the one before
  int64_t rows, count, width, stride;  // width and stride in bytes
};
NM_EXPORT int nm_keep_rows(const struct nm_keep *call);

enum nm_op { NM_OP_RMS_NORM = 0, NM_OP_ROPE_STORE = 1, NM_OP_ATTENTION = 2, NM_OP_LINEAR = 3,
             NM_OP_LINEAR_INT8 = 4, NM_OP_KEEP_ROWS = 5 };
enum nm_rows { NM_TOKENS = 0, NM_DRAWN = 1 };
struct nm_recorded {
  int64_t op;
  const void *call;  // the struct that the op's function takes; nm_linear_call for NM_OP_LINEAR
  int64_t rows;      // how many rows it has: as many as the step has tokens, or as it draws
};
// A step of T tokens in S sequences, R of which end in a draw: what a recorded call is told anew each time.
struct nm_step {
  const int32_t *positions;      // [T]
  const int64_t *slots;          // [T]
  const int32_t *query_starts;   // [S + 1]
  const int32_t *drawn_starts;   // [S + 1] the same, counting drawn tokens only
  const int32_t *drawn;          // [R] which tokens, ascending: of each sequence the last ones
  const int32_t *context_lens;   // [S]
  const int32_t *page_tables;    // [S, table_width]
  const int32_t *group_starts, *group_members, *group_pages;  // see nm_attention
  int64_t num_tokens, num_drawn;
  int32_t num_sequences, table_width, num_groups, num_members;
  int32_t groups_draw;           // 1: every member of a group draws
};
// Does the calls one after the other, up to the first that does not return NM_OK: its place and status. Those of the
// drawn rows are left out where there are none.
NM_EXPORT int nm_replay(const struct nm_recorded *recorded, int64_t count, const struct nm_step *step,
                        int64_t *stopped_at);

// Internal: parallel.c
// Calls body(first, last, data) over [0, count) in pieces of at most `grain`, on up to `threads` threads.
void nm_for(int64_t count, int64_t grain, int threads, void (*body)(int64_t, int64_t, void *), void *data);

#endif
