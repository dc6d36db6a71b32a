// The running softmax of a tile's rows, and a strip of rows against a block of keys.
//
// A row's state is m, Σ 2^(score - m) and Σ 2^(score - m) · V. Exact softmax takes the largest score for m; anything
// within 2^8 of it is as good, for what is summed are floats. So m moves only when a score exceeds it by SLACK, and most
// blocks leave it, and the sums, as they are.
#ifndef NIGHTMILL_SOFTMAX_H
#define NIGHTMILL_SOFTMAX_H

#include "amx.h"
#include "nightmill.h"
#include "product.h"

enum {
  MAX_ROWS = 128,  // rows of a tile
  PREFILL_ROWS = 96,  // of a prefill's tile: more of their sums and the keys stay in the first-level cache
  STATE = 8192,    // floats of a tile's running sums: 128 rows of 64, 32 rows of 256
  MAX_STRIP = 16,  // rows of the strips of AMX, others have STRIP
};

#define SLACK 8.0f

struct sums {  // a tile's running softmax
  float *acc;  // [rows, D], not yet divided by l
  float *m;    // [rows] no more than SLACK below the largest score so far, in units of log2; -inf: nothing seen
  float *l;    // [rows, VW] Σ 2^(score - m), lane by lane
};

// Groups of keys to be asked of memory while a tile is computed that waits for none: those of the tiles after it.
struct fetch {
  const struct tile *const *tiles;
  int64_t num_tiles, place;   // the first `place` are asked for
  int32_t key;                // of the next one, from which group on
  int32_t rate, credit;       // groups for a strip, and what is left of earlier strips', in units of 1 / FETCH_UNIT
};
enum { FETCH_UNIT = 256, FETCH_GROUPS = 2 };  // at most so many groups with a strip

struct scratch {
  unit q[STATE], k[KEYS * MAX_HEAD_DIM], v[KEYS * MAX_HEAD_DIM];  // groups that are not used as they lie
  float acc[2][STATE], m[2][MAX_ROWS], l[2][MAX_ROWS * VW];
  float scores[MAX_STRIP * KEYS];
  uint16_t weights[MAX_STRIP * KEYS];
  float gathered[2][GROUP * MAX_HEAD_DIM];  // K and V of a group that is not in one piece
  float shift[MAX_ROWS], limit[MAX_ROWS];   // of the sums being added to: -m, and the score from which m must move
  int32_t low[MAX_ROWS], high[MAX_ROWS];    // keys [low, high) are visible to the row
  struct block block;
  const struct tile *ahead;  // NULL, or the tile this thread computes next
  struct fetch fetch;        // what it computes after that
  int paired;     // pages are groups already: nm_paired
  int tile_rows;  // of AMX's tiles as they are configured; 0: not at all
#if HAVE_AMX
  struct tile_config config;
#endif
  float factor;   // scores · factor are in units of log2
};

// One per thread for the life of the thread: no allocation and no page faults in a call.
static _Thread_local struct scratch thread_scratch __attribute__((aligned(64)));

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }

// ---------------------------------------------------------------- sums

static void clear(struct sums sums, int rows, int dim) {
  memset(sums.acc, 0, sizeof(float) * (size_t)rows * (size_t)dim);
  memset(sums.l, 0, sizeof(float) * (size_t)rows * VW);
  for (int r = 0; r < rows; r++) sums.m[r] = -INFINITY;
}

static void set_limit(struct scratch *s, int row, float m) {
  s->shift[row] = m == -INFINITY ? 0.0f : -m;
  s->limit[row] = (m + SLACK) / s->factor;
}

// A row's sums from now on in units of its largest score, `best`.
static __attribute__((noinline)) void raise(struct scratch *s, struct sums sums, int row, int dim, float best) {
  const float before = sums.m[row];
  if (!(best > before)) return;
  sums.m[row] = best;
  set_limit(s, row, best);
  if (before == -INFINITY) return;
  float *acc = sums.acc + (int64_t)row * dim, *l = sums.l + row * VW;
  const vf shrink = exp2_v(splat(before - best));
  for (int i = 0; i < dim; i += VW) store(acc, i, load(acc, i, 0) * shrink, 0);
  store(l, 0, load(l, 0, 0) * shrink, 0);
}

// into ⊕= from, by the larger m. A side that has seen nothing leaves the other as it is, bit for bit.
static void merge(struct sums into, struct sums from, int rows, int dim) {
  for (int r = 0; r < rows; r++) {
    if (hsum(load(from.l, r * VW, 0)) == 0.0f) continue;  // not by m: a NaN among the scores must get through
    const float m = into.m[r] > from.m[r] ? into.m[r] : from.m[r];
    const vf a = exp2_v(splat(into.m[r] - m)), b = exp2_v(splat(from.m[r] - m));
    float *x = into.acc + (int64_t)r * dim;
    const float *y = from.acc + (int64_t)r * dim;
    for (int i = 0; i < dim; i += VW) store(x, i, fma_v(load(x, i, 0), a, load(y, i, 0) * b), 0);
    store(into.l, r * VW, fma_v(load(into.l, r * VW, 0), a, load(from.l, r * VW, 0) * b), 0);
    into.m[r] = m;
  }
}

// ---------------------------------------------------------------- weights

static __attribute__((noinline)) void cap_row(float *x, int width, float scale) {
  for (int i = 0; i < width; i += VW) store(x, i, tanh_v(load(x, i, 0) * scale), 0);
}

static __attribute__((noinline)) void mask_row(float *x, int width, int low, int high) {
  for (int i = 0; i < width; i += VW) {
    const vi key = lane_index() + i;
    store(x, i, choose((key >= low) & (key < high), load(x, i, 0), splat(-INFINITY)), 0);
  }
}

#if HAVE_PAIR
// 1 + f (C1 + f (C2 + f · C3)) is 2^f on [0, 1) to 8.6e-5 of its value, the least that three terms can do.
#define EXP2_C1 0.69511682f
#define EXP2_C2 0.22764482f
#define EXP2_C3 0.07706720f

// 2^x for a weight that is rounded to bf16: exact at whole x; 0 for -inf, NaN for NaN.
INLINE __m512 exp2_rough(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(EXP2_C3);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C2));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(EXP2_C1));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // times 2^floor(x)
}

// Scores of 32 keys into weights in bf16; returns `total` plus their sum: what is summed is what is used.
INLINE __m512 weigh_pairs(__m512 a, __m512 b, __m512 factor, __m512 shift, uint16_t *weights, __m512 total) {
  const __m512 x = exp2_rough(_mm512_fmadd_ps(a, factor, shift)), y = exp2_rough(_mm512_fmadd_ps(b, factor, shift));
  const __m512bh both = _mm512_cvtne2ps_pbh(y, x);
  _mm512_storeu_si512(weights, (__m512i)both);
  return _mm512_dpbf16_ps(total, both, (__m512bh)_mm512_set1_epi16(0x3f80));
}
#endif

INLINE void weigh_row(const struct scratch *s, float *x, uint16_t *weights, float *l, int row, int width,
                      const int pair) {
  const vf factor = splat(s->factor), shift = splat(s->shift[row]);
#if HAVE_PAIR
  if (pair) {
    __m512 total = _mm512_loadu_ps(l);
    for (int i = 0; i < width; i += 32) {
      const __m512 b = i + 16 < width ? _mm512_loadu_ps(x + i + 16) : _mm512_set1_ps(-INFINITY);
      total = weigh_pairs(_mm512_loadu_ps(x + i), b, (__m512)factor, (__m512)shift, weights + i, total);
    }
    _mm512_storeu_ps(l, total);
    return;
  }
#endif
  (void)weights, (void)pair;
  vf total = splat(0.0f);
  for (int i = 0; i < width; i += VW) {
    const vf weight = exp2_v(fma_v(load(x, i, 0), factor, shift));
    total += weight;
    store(x, i, weight, 0);
  }
  store(l, 0, load(l, 0, 0) + total, 0);
}

// The largest of `width` scores, lane by lane.
INLINE vf largest(const float *x, int width) {
  vf top = load(x, 0, 0);
  for (int i = VW; i < width; i += VW) top = vmax(load(x, i, 0), top);
  return top;
}

// Scores [rows, KEYS], masked, become weights in place (fp32) or in `weights` (pairs); m moves where it must.
INLINE void softmax_rows(struct scratch *s, struct sums sums, int row, int rows, int dim, int width, const int pair) {
  for (int r = 0; r < rows; r++) {
    float *x = s->scores + r * KEYS;
    const vf top = largest(x, width);
    if (any_above(top, splat(s->limit[row + r]))) raise(s, sums, row + r, dim, hmax(top) * s->factor);
    weigh_row(s, x, s->weights + r * KEYS, sums.l + (row + r) * VW, row + r, width, pair);
  }
}

static __attribute__((noinline)) void softmax(const struct nm_attention *call, struct scratch *s, struct sums sums,
                                              int row, int rows, int key, int groups, int pair) {
  const int width = groups * GROUP;
  for (int r = 0; r < rows; r++) {
    const int low = s->low[row + r] - key, high = s->high[row + r] - key;
    if (call->softcap > 0.0f) cap_row(s->scores + r * KEYS, width, call->scale / call->softcap);
    if (low > 0 || high < width) mask_row(s->scores + r * KEYS, width, low, high);
  }
  if (pair)
    softmax_rows(s, sums, row, rows, call->head_dim, width, 1);
  else
    softmax_rows(s, sums, row, rows, call->head_dim, width, 0);
}

// ---------------------------------------------------------------- a strip

#if HAVE_PAIR
// Moves m of the rows of a strip whose scores ask for it.
static __attribute__((noinline)) void raise_strip(struct scratch *s, struct sums sums, int row, int rows, int dim,
                                                  int width) {
  for (int r = 0; r < rows; r++) {
    const vf top = largest(s->scores + r * KEYS, width);
    if (any_above(top, splat(s->limit[row + r]))) raise(s, sums, row + r, dim, hmax(top) * s->factor);
  }
}

// Keys [low, high) of 64 as bits.
INLINE uint64_t visible(int low, int high) {
  const uint64_t below = high >= KEYS ? ~0ull : high <= 0 ? 0 : (1ull << high) - 1;
  return low <= 0 ? below : low >= KEYS ? 0 : below & (~0ull << low);
}

// Scores of what rows do not see become -inf.
INLINE void mask_strip(vf acc[STRIP][PANEL_VECTORS], const struct scratch *s, int row, int key, const int R,
                       const int N) {
  int edge = 0;
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) edge |= (s->high[row + r] - key < N * GROUP) | (s->low[row + r] > key);
  if (!edge) return;
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const __m512 hidden = _mm512_set1_ps(-INFINITY);
    const uint64_t bits = visible(s->low[row + r] - key, s->high[row + r] - key);
#pragma GCC unroll 4
    for (int j = 0; j < N; j++)
      acc[r][j] = (vf)_mm512_mask_mov_ps(hidden, (__mmask16)(bits >> j * GROUP), (__m512)acc[r][j]);
  }
}

INLINE int any_raises(vf acc[STRIP][PANEL_VECTORS], const struct scratch *s, int row, const int R, const int N) {
  uint32_t above = 0;
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    vf top = acc[r][0];
#pragma GCC unroll 4
    for (int j = 1; j < N; j++) top = vmax(acc[r][j], top);
    above |= _mm512_cmp_ps_mask((__m512)top, _mm512_set1_ps(s->limit[row + r]), _CMP_GT_OQ);
  }
  return above != 0;
}

// The first block of each segment comes here, so it has to be quick; a call keeps nothing in vector registers.
INLINE void raise_in_registers(vf acc[STRIP][PANEL_VECTORS], struct scratch *s, struct sums sums, int row, int dim,
                               const int R, const int N) {
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(s->scores + r * KEYS, j * VW, acc[r][j], 0);
  raise_strip(s, sums, row, R, dim, N * GROUP);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) acc[r][j] = load(s->scores + r * KEYS, j * VW, 0);
}

// Scores into weights, `stride` elements between rows.
INLINE void weigh_registers(vf acc[STRIP][PANEL_VECTORS], const struct scratch *s, struct sums sums, int row,
                            uint16_t *weights, int stride, const int R, const int N) {
  const __m512 factor = _mm512_set1_ps(s->factor), nothing = _mm512_set1_ps(-INFINITY);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const __m512 shift = _mm512_set1_ps(s->shift[row + r]);
    float *l = sums.l + (row + r) * VW;
    __m512 total = _mm512_loadu_ps(l);
#pragma GCC unroll 2
    for (int j = 0; j < N; j += 2)
      total = weigh_pairs((__m512)acc[r][j], j + 1 < N ? (__m512)acc[r][j + 1] : nothing, factor, shift,
                          weights + r * stride + j * GROUP, total);
    _mm512_storeu_ps(l, total);
  }
}

// scores_of and softmax in one: scores become weights in registers.
INLINE void weigh_strip(struct scratch *s, struct sums sums, int row, int key, int dim, const struct block *block,
                        const int R, const int N, const int ahead) {
  vf acc[STRIP][PANEL_VECTORS];
  multiply_keys(acc, s->q + (int64_t)row * dim / 2, dim / 2, block, 0, R, N, 1, ahead);
  mask_strip(acc, s, row, key, R, N);
  if (__builtin_expect(any_raises(acc, s, row, R, N), 0)) raise_in_registers(acc, s, sums, row, dim, R, N);
  weigh_registers(acc, s, sums, row, s->weights, KEYS, R, N);
}

INLINE void weigh_groups(struct scratch *s, struct sums sums, int row, int key, int dim, int groups,
                         const struct block *block, const int R, const int ahead) {
  // Few keys count where many strips meet the diagonal. Elsewhere more are multiplied than are seen, and code is saved.
  switch (ahead == PANEL_VECTORS || R < STRIP - 1 ? KEYS / GROUP : groups) {
    case 1: weigh_strip(s, sums, row, key, dim, block, R, 1, ahead); break;
    case 2: weigh_strip(s, sums, row, key, dim, block, R, 2, ahead); break;
    case 3: weigh_strip(s, sums, row, key, dim, block, R, 3, ahead); break;
    default: weigh_strip(s, sums, row, key, dim, block, R, 4, ahead); break;
  }
}
#endif

// R rows from `row` on against the first `groups` groups of the block at `key`.
INLINE void strip_of(const struct nm_attention *call, struct scratch *s, struct sums sums, int row, int key,
                     int groups, const struct block *block, const int R, const int pair, const int ahead) {
  const int dim = call->head_dim, units = pair ? dim / 2 : dim;
#if HAVE_PAIR
  if (pair && call->softcap == 0.0f) {
    weigh_groups(s, sums, row, key, dim, groups, block, R, ahead);
  } else
#endif
  {
    scores_of(s->scores, s->q + (int64_t)row * units, units, block, groups, R, pair, ahead);
    softmax(call, s, sums, row, R, key, groups, pair);
  }
  add_values(sums.acc + (int64_t)row * dim, dim, pair ? (const unit *)s->weights : (const unit *)s->scores,
             pair ? KEYS / 2 : KEYS, block, groups, R, pair, ahead);
}

#endif
