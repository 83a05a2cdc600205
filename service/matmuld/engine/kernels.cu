// The passes of kernels.py, which puts in front of this what they are compiled for:
//   A          the type that everything is computed in
//   S, T       summation: of the source and of its sums
//   P, D, C, V, X   finish: of the product, D, C, the vector (bias), and the aux
// and the macros that are tested below. Extents, steps and offsets count elements, in 64 bits.

typedef long long i64;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

__device__ inline float load(const f16* at) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(at->bits));
    return value;
}
__device__ inline float load(const bf16* at) { return __uint_as_float((unsigned)at->bits << 16); }
__device__ inline float load(const float* at) { return *at; }
__device__ inline double load(const double* at) { return *at; }

// Rounded to the nearest, ties to even.
__device__ inline void store(f16* at, float value) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(at->bits) : "f"(value));
}
__device__ inline void store(bf16* at, float value) {
    unsigned bits = __float_as_uint(value);
    at->bits = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ inline void store(float* at, float value) { *at = value; }
__device__ inline void store(double* at, double value) { *at = value; }

#ifdef FINISH

#define SQRT_HALF A(0.70710678118654752440)
#define GELU_SCALE A(0.79788456080286535588)
#define GELU_CUBIC A(0.044715)
#define NORMAL_DENSITY_AT_0 A(0.39894228040143267794)

__device__ inline A none(A z) { return z; }
__device__ inline A relu(A z) { return z < 0 ? A(0) : z; }
__device__ inline A gelu(A z) {
    return A(0.5) * z * (1 + tanh(GELU_SCALE * (z + GELU_CUBIC * z * z * z)));
}
__device__ inline A gelu_slope(A z) {
    A t = tanh(GELU_SCALE * (z + GELU_CUBIC * z * z * z));
    A inner = GELU_SCALE * (1 + 3 * GELU_CUBIC * z * z);
    return A(0.5) * (1 + t) + A(0.5) * z * (1 - t * t) * inner;
}
__device__ inline A gelu_erf(A z) { return A(0.5) * z * erfc(-SQRT_HALF * z); }
__device__ inline A gelu_erf_slope(A z) {
    return A(0.5) * erfc(-SQRT_HALF * z) + z * NORMAL_DENSITY_AT_0 * exp(A(-0.5) * z * z);
}
__device__ inline A silu(A z) { return z / (1 + exp(-z)); }
__device__ inline A silu_slope(A z) {
    A sigmoid = 1 / (1 + exp(-z));
    return sigmoid * (1 + z * (1 - sigmoid));
}
__device__ inline A leaky_relu(A z) { return z > 0 ? z : A(NEGATIVE_SLOPE) * z; }
__device__ inline A leaky_relu_slope(A z) { return z > 0 ? A(1) : A(NEGATIVE_SLOPE); }

#define STEPS(of) i64 of##_batch, i64 of##_row, i64 of##_column
#define AT(of, row, column) (batch * of##_batch + (row) * of##_row + (column) * of##_column)

// A block of 32 by 8 threads does a tile of 128 elements along the inner axis, and along the outer
// axis one part of it. A warp stands side by side along the inner axis, so that it makes 4 bytes of
// a mask at a time; a tile of 128 rows is what a mask is padded to.
extern "C" __global__ void __launch_bounds__(256) finish(
    const P* product, STEPS(product), D* d, STEPS(d), const C* c, STEPS(c), double beta,
    const V* vector, STEPS(vector), X* aux, STEPS(aux), A* partial,
    i64 batches, i64 inners, i64 outers, i64 tiles, i64 parts, i64 length
) {
    i64 tile = blockIdx.x % tiles;
    i64 part = blockIdx.x / tiles % parts;
    i64 batch = blockIdx.x / tiles / parts;
    i64 first = tile * 128 + threadIdx.x;
    i64 end = min((part + 1) * length, outers);
#if SUM_D
    A total[4] = {0, 0, 0, 0};
#endif
    for (i64 outer = part * length + threadIdx.y; outer < end; outer += 8) {
        A values[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            i64 inner = first + 32 * k;
            i64 row = ROWS_INNER ? inner : outer, column = ROWS_INNER ? outer : inner;
            values[k] = 0;
            if (inner < inners) {
                values[k] = load(product + AT(product, row, column));
                if (c) values[k] += A(beta) * A(load(c + AT(c, row, column)));
#if BIAS
                values[k] += A(load(vector + AT(vector, row, 0)));
#endif
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            i64 inner = first + 32 * k;
            i64 row = ROWS_INNER ? inner : outer, column = ROWS_INNER ? outer : inner;
            A z = values[k];
#if MASK_OUT
            unsigned bits = __ballot_sync(0xffffffffu, inner < inners && !(z < 0));
            if (threadIdx.x % 8 == 0) aux[AT(aux, row / 8, column)] = X(bits >> threadIdx.x);
#endif
            if (inner >= inners) continue;
#if AUX_OUT
            store(aux + AT(aux, row, column), z);
#endif
            z = ACTIVATION(z);
#if MASK_IN
            z = aux[AT(aux, row / 8, column)] >> (row % 8) & 1 ? z : A(0);
#elif AUX_IN
            z *= SLOPE(A(load(aux + AT(aux, row, column))));
#endif
            store(d + AT(d, row, column), z);
#if SUM_D
            total[k] += z;
#endif
        }
    }
#if SUM_D
    __shared__ A shared[8][128];
#pragma unroll
    for (int k = 0; k < 4; k++) shared[threadIdx.y][threadIdx.x + 32 * k] = total[k];
    __syncthreads();
    int mine = threadIdx.y * 32 + threadIdx.x;
    if (mine < 128 && tile * 128 + mine < inners) {
        A sum = 0;
        for (int y = 0; y < 8; y++) sum += shared[y][mine];
        partial[(part * batches + batch) * inners + tile * 128 + mine] = sum;
    }
#endif
}

#else

// A block of 32 by 8 threads sums one part of what is to be summed, for 32 sums if those lie side
// by side (KEPT_INNER), else for 8, a warp for each.
extern "C" __global__ void __launch_bounds__(256) summation(
    const S* source, i64 source_batch, i64 source_kept, i64 source_summed,
    T* sums, i64 sums_part, i64 sums_batch, i64 sums_kept,
    i64 kept, i64 summed, i64 tiles, i64 parts, i64 length
) {
    i64 tile = blockIdx.x % tiles;
    i64 part = blockIdx.x / tiles % parts;
    i64 batch = blockIdx.x / tiles / parts;
    i64 begin = part * length, end = min(begin + length, summed);
#if KEPT_INNER
    i64 mine = tile * 32 + threadIdx.x;
#else
    i64 mine = tile * 8 + threadIdx.y;
#endif
    A sum = 0;
    if (mine < kept) {
        source += batch * source_batch + mine * source_kept;
#if KEPT_INNER
#pragma unroll 4
        for (i64 i = begin + threadIdx.y; i < end; i += 8) sum += load(source + i * source_summed);
#else
#pragma unroll 4
        for (i64 i = begin + threadIdx.x; i < end; i += 32) sum += load(source + i * source_summed);
#endif
    }
#if KEPT_INNER
    __shared__ A shared[8][32];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0)
        for (int y = 1; y < 8; y++) sum += shared[y][threadIdx.x];
    bool is_whole = threadIdx.y == 0;
#else
    for (int apart = 16; apart; apart /= 2) sum += __shfl_down_sync(0xffffffffu, sum, apart);
    bool is_whole = threadIdx.x == 0;
#endif
    if (is_whole && mine < kept)
        store(sums + part * sums_part + batch * sums_batch + mine * sums_kept, sum);
}

#endif
