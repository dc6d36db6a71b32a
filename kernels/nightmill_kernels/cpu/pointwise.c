// Memory-bound operations of the decoder, a row at a time.
#include "gate.h"

#define SERIAL_ELEMENTS 32768  // below this much work a team costs more than it saves

static int64_t grain_for(int64_t rows, int64_t row_elements, int threads) {
  if (rows * row_elements <= SERIAL_ELEMENTS) return rows;
  return (rows + 2 * threads - 1) / (2 * threads);
}

// ---------------------------------------------------------------- RMS norm

// Factors that all rows of a piece share, widened once: wider rows widen them again for each.
enum { FACTORS = 8192 };

INLINE vf factor(const struct nm_norm *c, const float *factors, int64_t i, const int bf16) {
  return factors ? load(factors, i, 0) : load(c->weight, i, bf16) + c->weight_offset;
}

INLINE void norm_row(const struct nm_norm *c, const void *x, void *residual, void *out, const float *factors,
                     const int adds, const int bf16) {
  const int64_t dim = c->dim, whole = dim - dim % VW;
  const int tail = (int)(dim - whole);
  vf squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};  // one sum would wait for itself
  int64_t i = 0;
  for (; i + 4 * VW <= whole; i += 4 * VW)
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      vf value = load(x, i + k * VW, bf16);
      if (adds) {
        store(residual, i + k * VW, value + load(residual, i + k * VW, bf16), bf16);
        value = load(residual, i + k * VW, bf16);  // normalise what was rounded
      }
      squares[k] = fma_v(value, value, squares[k]);
    }
  for (; i < whole; i += VW) {
    vf value = load(x, i, bf16);
    if (adds) {
      store(residual, i, value + load(residual, i, bf16), bf16);
      value = load(residual, i, bf16);
    }
    squares[0] = fma_v(value, value, squares[0]);
  }
  if (tail) {
    vf value = load_tail(x, whole, tail, 0.0f, bf16);
    if (adds) {
      store_tail(residual, whole, value + load_tail(residual, whole, tail, 0.0f, bf16), tail, bf16);
      value = load_tail(residual, whole, tail, 0.0f, bf16);
    }
    squares[1] = fma_v(value, value, squares[1]);
  }
  const float sum = hsum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const vf scale = splat(1.0f / sqrtf(sum / (float)dim + c->eps));
  const void *from = adds ? residual : x;
  for (i = 0; i < whole; i += VW) store(out, i, load(from, i, bf16) * scale * factor(c, factors, i, bf16), bf16);
  if (tail) {
    vf weight = load_tail(c->weight, whole, tail, 0.0f, bf16) + c->weight_offset;
    store_tail(out, whole, load_tail(from, whole, tail, 0.0f, bf16) * scale * weight, tail, bf16);
  }
}

INLINE void norm_piece(const struct nm_norm *c, int64_t first, int64_t last, const int adds, const int bf16) {
  const int64_t size = bf16 ? 2 : 4;
  float memory[FACTORS] __attribute__((aligned(64)));
  const float *factors = c->dim <= FACTORS && last - first > 1 ? memory : NULL;
  if (factors)
    for (int64_t i = 0; i + VW <= c->dim; i += VW) store(memory, i, factor(c, NULL, i, bf16), 0);
  int64_t outer = first / c->inner, inner = first % c->inner;
  for (int64_t row = first; row < last; row++) {
    const char *x = (const char *)c->x + (outer * c->x_stride + inner * c->dim) * size;
    char *out = (char *)c->out + (outer * c->out_stride + inner * c->dim) * size;
    char *residual = adds ? (char *)c->residual + row * c->dim * size : NULL;
    norm_row(c, x, residual, out, factors, adds, bf16);
    if (++inner == c->inner) outer++, inner = 0;
  }
}

static void norm_rows(int64_t first, int64_t last, void *data) {
  const struct nm_norm *c = data;
  if (c->residual && c->dtype == NM_BF16) norm_piece(c, first, last, 1, 1);
  if (c->residual && c->dtype == NM_F32) norm_piece(c, first, last, 1, 0);
  if (!c->residual && c->dtype == NM_BF16) norm_piece(c, first, last, 0, 1);
  if (!c->residual && c->dtype == NM_F32) norm_piece(c, first, last, 0, 0);
}

int nm_rms_norm(const struct nm_norm *call) {
  if ((call->dtype != NM_F32 && call->dtype != NM_BF16) || call->dim < 1 || call->inner < 1) return NM_UNSUPPORTED;
  const int64_t rows = call->outer * call->inner;
  nm_for(rows, grain_for(rows, call->dim, call->threads), call->threads, norm_rows, (void *)call);
  return NM_OK;
}

// ---------------------------------------------------------------- RoPE and the write into the page pool

INLINE void rotate(void *head, const float *cosine, const float *sine, int half, const int bf16) {
  const int whole = half - half % VW, tail = half - whole;
  for (int i = 0; i < whole; i += VW) {
    vf a = load(head, i, bf16), b = load(head, half + i, bf16);
    vf c = load(cosine, i, 0), s = load(sine, i, 0);
    store(head, i, a * c - b * s, bf16);
    store(head, half + i, b * c + a * s, bf16);
  }
  if (tail) {
    vf a = load_tail(head, whole, tail, 0.0f, bf16), b = load_tail(head, half + whole, tail, 0.0f, bf16);
    vf c = load_tail(cosine, whole, tail, 0.0f, 0), s = load_tail(sine, whole, tail, 0.0f, 0);
    store_tail(head, whole, a * c - b * s, tail, bf16);
    store_tail(head, half + whole, b * c + a * s, tail, bf16);
  }
}

static int64_t position_of(const struct nm_rope *c, int64_t t) {
  return c->wide_positions ? ((const int64_t *)c->positions)[t] : ((const int32_t *)c->positions)[t];
}

// A token's K and V of one head [D], into a plain page and head: `offset` is the token's place in the page.
static void put_plain(char *k_page, char *v_page, const char *k, const char *v, int64_t offset, int64_t bytes) {
  memcpy(k_page + offset * bytes, k, (size_t)bytes);
  memcpy(v_page + offset * bytes, v, (size_t)bytes);
}

// The same into a paired page. Neighbours in a page may be another thread's: nothing of theirs is written, so no
// vectors here.
static void put_paired(uint16_t *k_page, uint16_t *v_page, const uint16_t *k, const uint16_t *v, int64_t offset,
                       int dim) {
  const int64_t group = offset / 16 * 16 * dim, key = offset % 16;
  for (int i = 0; i < dim / 2; i++) memcpy(k_page + group + (i * 16 + key) * 2, k + 2 * i, 4);
  uint16_t *to = v_page + group + key / 2 * 2 * dim + key % 2;
  for (int i = 0; i < dim; i++) to[2 * i] = v[i];
}

static void store_token(const struct nm_rope *c, int64_t t, const char *k, const char *v) {
  const int64_t size = c->dtype == NM_BF16 ? 2 : 4, bytes = c->head_dim * size;
  const int64_t page = c->slots[t] / c->page_size, offset = c->slots[t] % c->page_size;
  const int paired = nm_paired(c->dtype, c->head_dim, c->page_size);
  for (int h = 0; h < c->kv_heads; h++) {
    const int64_t at = (page * c->pool_stride + (int64_t)h * c->page_size * c->head_dim) * size;
    char *k_page = (char *)c->k_pool + at, *v_page = (char *)c->v_pool + at;
    if (paired)
      put_paired((uint16_t *)k_page, (uint16_t *)v_page, (const uint16_t *)(k + h * bytes),
                 (const uint16_t *)(v + h * bytes), offset, c->head_dim);
    else
      put_plain(k_page, v_page, k + h * bytes, v + h * bytes, offset, bytes);
  }
}

static void rope_token(const struct nm_rope *c, int64_t t) {
  const int64_t size = c->dtype == NM_BF16 ? 2 : 4;
  const int64_t head_bytes = c->head_dim * size;
  char *q = (char *)c->q + t * c->q_stride * size, *k = (char *)c->k + t * c->k_stride * size;
  if (c->cos_sin) {
    const int half = c->rot / 2;
    const float *cosine = c->cos_sin + position_of(c, t) * c->rot, *sine = cosine + half;
    for (int h = 0; h < c->heads + c->kv_heads; h++) {
      char *head = h < c->heads ? q + h * head_bytes : k + (h - c->heads) * head_bytes;
      if (c->dtype == NM_BF16)
        rotate(head, cosine, sine, half, 1);
      else
        rotate(head, cosine, sine, half, 0);
    }
  }
  if (c->slots && c->slots[t] >= 0) store_token(c, t, k, (const char *)c->v + t * c->v_stride * size);
}

static void rope_tokens(int64_t first, int64_t last, void *data) {
  for (int64_t t = first; t < last; t++) rope_token(data, t);
}

int nm_rope_store(const struct nm_rope *c) {
  if (c->dtype != NM_F32 && c->dtype != NM_BF16) return NM_UNSUPPORTED;
  for (int64_t t = 0; t < c->num_tokens; t++) {
    if (c->cos_sin && (position_of(c, t) < 0 || position_of(c, t) >= c->max_len)) return NM_BAD_POSITION;
    if (c->slots && c->slots[t] >= c->num_pages * c->page_size) return NM_BAD_SLOT;
  }
  // In a paired page a token's K has its part in every line of its group.
  const int touched = c->slots && nm_paired(c->dtype, c->head_dim, c->page_size) ? 16 * c->kv_heads : 2 * c->kv_heads;
  const int64_t row = (int64_t)(c->cos_sin ? c->heads + touched : touched) * c->head_dim;
  nm_for(c->num_tokens, grain_for(c->num_tokens, row, c->threads), c->threads, rope_tokens, (void *)c);
  return NM_OK;
}

// ---------------------------------------------------------------- gated activations

struct gated {
  const void *gate_up;
  void *out;
  int64_t width, stride;
  int dtype, gate;
};

INLINE void gated_row(const void *row, void *out, int64_t width, const int gate, const int bf16) {
  const int64_t whole = width - width % VW;
  const int tail = (int)(width - whole);
  for (int64_t i = 0; i < whole; i += VW)
    store(out, i, gated(load(row, i, bf16), load(row, width + i, bf16), gate), bf16);
  if (tail) {
    vf g = load_tail(row, whole, tail, 0.0f, bf16), up = load_tail(row, width + whole, tail, 0.0f, bf16);
    store_tail(out, whole, gated(g, up, gate), tail, bf16);
  }
}

static void gated_rows(int64_t first, int64_t last, void *data) {
  const struct gated *c = data;
  const int64_t size = c->dtype == NM_BF16 ? 2 : 4;
  for (int64_t row = first; row < last; row++) {
    const void *from = (const char *)c->gate_up + row * c->stride * size;
    void *out = (char *)c->out + row * c->width * size;
    if (c->dtype == NM_BF16 && c->gate == NM_SILU) gated_row(from, out, c->width, NM_SILU, 1);
    if (c->dtype == NM_BF16 && c->gate == NM_GELU_TANH) gated_row(from, out, c->width, NM_GELU_TANH, 1);
    if (c->dtype == NM_F32 && c->gate == NM_SILU) gated_row(from, out, c->width, NM_SILU, 0);
    if (c->dtype == NM_F32 && c->gate == NM_GELU_TANH) gated_row(from, out, c->width, NM_GELU_TANH, 0);
  }
}

int nm_gated_mul(const void *gate_up, void *out, int64_t rows, int64_t width, int64_t stride, int dtype, int gate,
                 int threads) {
  if (dtype != NM_F32 && dtype != NM_BF16) return NM_UNSUPPORTED;
  struct gated call = {gate_up, out, width, stride, dtype, gate};
  nm_for(rows, grain_for(rows, 2 * width, threads), threads, gated_rows, &call);
  return NM_OK;
}

// ---------------------------------------------------------------- argmax

struct choice {
  const void *logits;
  int32_t *out;
  int64_t vocab, stride;
  int dtype;
};

#define ARGMAX_BLOCK 1024

INLINE int32_t argmax_row(const void *row, int64_t vocab, const int bf16) {
  float best = -INFINITY;
  int64_t best_block = -1;
  vi nan = {0};
  for (int64_t block = 0; block < vocab; block += ARGMAX_BLOCK) {
    const int64_t end = block + ARGMAX_BLOCK < vocab ? block + ARGMAX_BLOCK : vocab;
    const int64_t whole = end - (end - block) % VW;
    vf top = splat(-INFINITY);
    for (int64_t i = block; i < whole; i += VW) {
      vf x = load(row, i, bf16);
      nan |= x != x;
      top = vmax(x, top);
    }
    if (whole < end) {
      vf x = load_tail(row, whole, (int)(end - whole), -INFINITY, bf16);
      nan |= x != x;
      top = vmax(x, top);
    }
    const float block_best = hmax(top);
    if (block_best > best) {
      best = block_best;
      best_block = block;
    }
  }
  int any_nan = 0;
  for (int i = 0; i < VW; i++) any_nan |= nan[i];
  if (any_nan || !(best < INFINITY) || best_block < 0) return -1;
  for (int64_t i = best_block;; i++)
    if ((bf16 ? widen(((const uint16_t *)row)[i]) : ((const float *)row)[i]) == best) return (int32_t)i;
}

static void argmax_rows(int64_t first, int64_t last, void *data) {
  const struct choice *c = data;
  for (int64_t row = first; row < last; row++) {
    if (c->dtype == NM_BF16)
      c->out[row] = argmax_row((const uint16_t *)c->logits + row * c->stride, c->vocab, 1);
    else
      c->out[row] = argmax_row((const float *)c->logits + row * c->stride, c->vocab, 0);
  }
}

int nm_argmax(const void *logits, int32_t *out, int64_t rows, int64_t vocab, int64_t stride, int dtype, int threads) {
  if ((dtype != NM_F32 && dtype != NM_BF16) || vocab < 1 || vocab > INT32_MAX) return NM_UNSUPPORTED;
  struct choice call = {logits, out, vocab, stride, dtype};
  nm_for(rows, grain_for(rows, vocab, threads), threads, argmax_rows, &call);
  return NM_OK;
}
