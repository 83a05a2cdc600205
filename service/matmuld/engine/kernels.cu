// The passes of kernels.py, which puts in front of this what they are compiled for:
//   A                  the type that everything is computed in
//   P, D, C, V, X, T   finish: of the product, D, C, the vector (bias), the aux, and the sums
//   S, T               summation: of the source and of its sums
//   WIDTH              how many elements side by side a thread takes at once, 16 bytes at most
// and the macros that are tested below. Extents and steps count elements, in 64 bits.

typedef long long i64;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

__device__ inline float load(f16 element) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element.bits));
    return value;
}
__device__ inline float load(bf16 element) { return __uint_as_float((unsigned)element.bits << 16); }
__device__ inline float load(float element) { return element; }
__device__ inline double load(double element) { return element; }

// Rounded to the nearest, ties to even.
__device__ inline void store(f16* at, float value) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(at->bits) : "f"(value));
}
__device__ inline void store(bf16* at, float value) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(at->bits) : "f"(value));
}
__device__ inline void store(float* at, float value) { *at = value; }
__device__ inline void store(double* at, double value) { *at = value; }

// What is read or written at once. Two elements of 16 bits stay in one register until they are
// needed, so that no read waits for the one before.
template <typename E, int BYTES = sizeof(E)> struct alignas(WIDTH * BYTES) Pack {
    E elements[WIDTH];
    __device__ A get(int j) const { return load(elements[j]); }
    __device__ void set(int j, A value) { store(&elements[j], value); }
};
#if WIDTH > 1
template <typename E> struct alignas(WIDTH * 2) Pack<E, 2> {
    unsigned pairs[WIDTH / 2];
    __device__ A get(int j) const {
        E element;
        element.bits = pairs[j / 2] >> j % 2 * 16;
        return load(element);
    }
    __device__ void set(int j, A value) {
        E element;
        store(&element, value);
        pairs[j / 2] = j % 2 ? pairs[j / 2] | element.bits << 16 : element.bits;
    }
};
#endif

template <typename E> __device__ inline Pack<E> read(const E* at) {
    return *reinterpret_cast<const Pack<E>*>(at);
}
template <typename E> __device__ inline void write(E* at, Pack<E> pack) {
    *reinterpret_cast<Pack<E>*>(at) = pack;
}

// A matrix by an inner and an outer axis.
template <typename E> struct Matrix {
    E* at;
    i64 batch, inner, outer;
    __device__ E* part(i64 b, i64 i) const { return at + b * batch + i * inner; }
};

#ifdef FINISH

#define SQRT_HALF A(0.70710678118654752440)
#define GELU_SCALE A(0.79788456080286535588)
#define GELU_CUBIC A(0.044715)
#define NORMAL_DENSITY_AT_0 A(0.39894228040143267794)

// In float32 good to 2 units in the last place, and 0 beyond 2¹²⁶.
__device__ inline float divide(float a, float b) { return __fdividef(a, b); }
__device__ inline double divide(double a, double b) { return a / b; }

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
__device__ inline A silu(A z) { return divide(z, 1 + exp(-z)); }
__device__ inline A silu_slope(A z) {
    A sigmoid = divide(A(1), 1 + exp(-z));
    return sigmoid * (1 + z * (1 - sigmoid));
}
__device__ inline A leaky_relu(A z) { return z > 0 ? z : A(NEGATIVE_SLOPE) * z; }
__device__ inline A leaky_relu_slope(A z) { return z > 0 ? A(1) : A(NEGATIVE_SLOPE); }

// `inner` is the axis along which a warp stands side by side.
struct Finish {
    Matrix<const P> product;
    Matrix<D> d;
    Matrix<const C> c;
    Matrix<const V> vector;
    Matrix<X> aux;
    Matrix<T> sums;
    A* partial;         // sums of parts: batches, parts, inners of all tiles
    unsigned* arrived;  // blocks that have written theirs: batches, tiles
    double beta;
    i64 inners, covered, outers, length;  // `covered`: inners with those that pad a mask
    unsigned tiles, parts;
};

// The totals of all rows of threads, in the first row.
__device__ inline void add_up(A (&totals)[WIDTH]) {
    __shared__ A shared[WIDTH][256];
    int mine = threadIdx.y * blockDim.x + threadIdx.x;
    for (int j = 0; j < WIDTH; j++) shared[j][mine] = totals[j];
    for (int half = blockDim.y / 2; half; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half)
            for (int j = 0; j < WIDTH; j++) shared[j][mine] += shared[j][mine + half * blockDim.x];
    }
    for (int j = 0; j < WIDTH; j++) totals[j] = shared[j][mine];
}

// Whether this block is the last of those that count here, and sees what their first rows have
// written. The last one leaves the counter at 0.
__device__ inline bool is_last(unsigned* arrived, unsigned blocks) {
    __shared__ bool last;
    if (threadIdx.y == 0) __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) last = atomicInc(arrived, blocks - 1) == blocks - 1;
    __syncthreads();
    __threadfence();
    return last;
}

// A block does a tile along the inner axis, and along the outer axis one part of it, where each row
// of its threads takes every so many: ROWS at a time, so that as many loads are under way. All
// threads go the same number of times around, for the shuffles.
extern "C" __global__ void __launch_bounds__(256) finish(const Finish f) {
    unsigned tile = blockIdx.x % f.tiles;
    unsigned part = blockIdx.x / f.tiles % f.parts;
    unsigned batch = blockIdx.x / f.tiles / f.parts;
    i64 inner = ((i64)tile * blockDim.x + threadIdx.x) * WIDTH;
    bool inside = inner < f.inners;
    i64 begin = part * f.length, end = min(begin + f.length, f.outers);
    const P* product = f.product.part(batch, inner);
#if WRITE_D
    D* d = f.d.part(batch, inner);
#endif
#if ADD_C
    const C* c = f.c.part(batch, inner);
#endif
#if BIAS
    const V* vector = f.vector.part(batch, inner);
#if ROWS_INNER
    A bias[WIDTH] = {};
    if (inside && f.vector.inner == 1 && (unsigned long long)vector % sizeof(Pack<V>) == 0) {
        Pack<V> biases = read(vector);
        for (int j = 0; j < WIDTH; j++) bias[j] = biases.get(j);
    } else if (inside) {
        for (int j = 0; j < WIDTH; j++) bias[j] = load(vector[j * f.vector.inner]);
    }
#endif
#endif
#if (MASK_IN || MASK_OUT) && ROWS_INNER
    X* aux = f.aux.part(batch, inner / 8);
#elif MASK_IN || AUX_IN || AUX_OUT
    X* aux = f.aux.part(batch, inner);
#endif
#if SUM_D
    A totals[WIDTH] = {};
#endif
    for (i64 first = begin + threadIdx.y; first - threadIdx.y < end; first += ROWS * blockDim.y) {
        Pack<P> products[ROWS];
#if ADD_C
        Pack<C> addends[ROWS];
#endif
#if AUX_IN
        Pack<X> inputs[ROWS];
#elif MASK_IN
        unsigned masks[ROWS];
#endif
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            i64 outer = first + r * blockDim.y;
            products[r] = {};
            if (!inside || outer >= end) continue;
            products[r] = read(product + outer * f.product.outer);
#if ADD_C
            addends[r] = read(c + outer * f.c.outer);
#endif
#if AUX_IN
            inputs[r] = read(aux + outer * f.aux.outer);
#elif MASK_IN && ROWS_INNER
            masks[r] = aux[outer * f.aux.outer] >> inner % 8;
#elif MASK_IN
            masks[r] = 0;
            for (int j = 0; j < WIDTH; j++)
                masks[r] |= (aux[j * f.aux.inner + outer / 8 * f.aux.outer] >> outer % 8 & 1) << j;
#endif
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            i64 outer = first + r * blockDim.y;
            bool is_mine = inside && outer < end;
            A z[WIDTH];
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                z[j] = products[r].get(j);
#if ADD_C
                z[j] += A(f.beta) * addends[r].get(j);
#endif
#if BIAS && ROWS_INNER
                z[j] += bias[j];
#elif BIAS
                if (is_mine) z[j] += load(vector[outer * f.vector.outer]);
#endif
            }
#if MASK_OUT
            unsigned bits = 0;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) bits |= (unsigned)(is_mine && !(z[j] < 0)) << j;
#pragma unroll
            for (int n = 1; n * WIDTH < 8; n *= 2)
                bits |= __shfl_down_sync(0xffffffffu, bits, n) << n * WIDTH;
            if (inner % 8 == 0 && inner < f.covered && outer < end) aux[outer * f.aux.outer] = bits;
#endif
            if (!is_mine) continue;
#if AUX_OUT
            Pack<X> output;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) output.set(j, z[j]);
            write(aux + outer * f.aux.outer, output);
#endif
#if WRITE_D
            Pack<D> results;
#endif
#pragma unroll
            for (int j = 0; j < WIDTH; j++) {
                z[j] = ACTIVATION(z[j]);
#if AUX_IN
                z[j] *= SLOPE(inputs[r].get(j));
#elif MASK_IN
                z[j] = masks[r] >> j & 1 ? z[j] : A(0);
#endif
#if SUM_D
                totals[j] += z[j];
#endif
#if WRITE_D
                results.set(j, z[j]);
#endif
            }
#if WRITE_D
            write(d + outer * f.d.outer, results);
#endif
        }
    }
#if SUM_D
    add_up(totals);
    i64 padded = (i64)f.tiles * blockDim.x * WIDTH;
    A* partial = f.partial + batch * f.parts * padded + inner;
    if (f.parts > 1) {
        if (threadIdx.y == 0)
            for (int j = 0; j < WIDTH; j++) partial[part * padded + j] = totals[j];
        if (!is_last(f.arrived + batch * f.tiles + tile, f.parts)) return;
        for (int j = 0; j < WIDTH; j++) totals[j] = 0;
#pragma unroll 4
        for (unsigned p = threadIdx.y; p < f.parts; p += blockDim.y)
            for (int j = 0; j < WIDTH; j++) totals[j] += __ldcg(partial + p * padded + j);
        add_up(totals);
    }
    if (threadIdx.y == 0 && inside)
        for (int j = 0; j < WIDTH; j++)
            store(f.sums.part(batch, inner) + j * f.sums.inner, totals[j]);
#endif
}

#else

struct Summation {
    Matrix<const S> source;  // `inner`: what is kept
    Matrix<T> sums;          // `outer` from one part to the next
    i64 kept, summed, length;
    unsigned tiles, parts;
};

// A block of 32 by 8 threads sums one part of what is to be summed for 8 sums, a warp for each.
extern "C" __global__ void __launch_bounds__(256) summation(const Summation s) {
    unsigned tile = blockIdx.x % s.tiles;
    unsigned part = blockIdx.x / s.tiles % s.parts;
    unsigned batch = blockIdx.x / s.tiles / s.parts;
    i64 mine = (i64)tile * 8 + threadIdx.y;
    if (mine >= s.kept) return;
    i64 begin = part * s.length, end = min(begin + s.length, s.summed);
    const S* source = s.source.part(batch, mine);
    A sum = 0;
    for (i64 first = begin + threadIdx.x * WIDTH; first < end; first += 32 * WIDTH * ROWS) {
        Pack<S> packs[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            i64 at = first + r * 32 * WIDTH;
            packs[r] = {};
#if DENSE
            if (at + WIDTH <= end) {
                packs[r] = read(source + at);
                continue;
            }
#endif
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                if (at + j < end) packs[r].set(j, load(source[(at + j) * s.source.outer]));
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < WIDTH; j++) sum += packs[r].get(j);
    }
    for (int apart = 16; apart; apart /= 2) sum += __shfl_down_sync(0xffffffffu, sum, apart);
    if (threadIdx.x == 0) store(s.sums.part(batch, mine) + part * s.sums.outer, sum);
}

#endif
