// Latent attention of up to 16 query rows a program on tensor cores, and the merge of partial results.
//
// A program walks through its part of the line of all blocks (`schedule.py`), 32 tokens at a time. One warp copies rows
// into a ring in shared memory. Two groups of four warps take every other piece: each warp has 128 columns of the latent
// part, for the scores as for the output. The four add up their scores through shared memory, and each computes all
// weights for itself. At the end of a request the groups put together what they have, half of it each.
//
// Macros: PACKED (rows of 656 bytes), HEADS, ROW_BLOCKS, STAGES (even: a group has to see every phase of its barriers),
// AHEAD (pieces to fetch into the L2 while the kernel ahead still runs).
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct alignas(64) Map { u64 words[16]; };

constexpr int TOKENS = 32;
constexpr int ROW = PACKED ? 656 : 1152;
constexpr int STAGE = TOKENS * ROW;
constexpr int EXCHANGE = 2 * 2 * 4 * 4 * 32 * 16;  // groups, buffers, warps, tiles, lanes, bytes
constexpr int RING = STAGES * STAGE;
constexpr int OVERHEAD = 4;
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ u32 shared_at(const void* p) {
    u32 a;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
    return a;
}
__device__ __forceinline__ void barrier_init(u32 at, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 at, u32 phase) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(at), "r"(phase) : "memory");
    } while (!done);
}
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void load4(u32* r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load4_turned(u32* r, u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void mma(float* c, const u32* a, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float exp2_of(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
__device__ __forceinline__ float4 read4(u32 at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void write4(u32 at, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ float read1(u32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ void write1(u32 at, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
__device__ __forceinline__ void begin_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
constexpr u64 ONCE = 0x12F0000000000000ull;  // L2: evict first
__device__ __forceinline__ void copy_flat(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(ONCE) : "memory");
}
__device__ __forceinline__ void copy_rows(u32 to, const Map* map, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %2}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(0), "r"(row), "r"(barrier), "l"(ONCE) : "memory");
}
// Two e4m3 in bytes 1 and 3 (0 and 2) as bfloat16 that are 2^-120 of them.
__device__ __forceinline__ u32 odd_bytes(u32 w) { return ((w >> 4) & 0x07f007f0u) | (w & 0x80008000u); }
__device__ __forceinline__ u32 even_bytes(u32 w) { return ((w << 4) & 0x07f007f0u) | ((w << 8) & 0x80008000u); }

constexpr float BIG = 1152921504606846976.0f;  // 2^60

__device__ __forceinline__ u32 enlarge(u32 two) {
    float a = __uint_as_float(two << 16) * BIG, b = __uint_as_float(two & 0xffff0000u) * BIG;
    return (__float_as_uint(a) >> 16) | (__float_as_uint(b) & 0xffff0000u);
}

struct Span { int begin, end, length; bool whole; };

__device__ __forceinline__ Span span(int r, int low, int high, const int* starts, const int* seq_lens) {
    int at = __ldg(starts + r) + OVERHEAD, length = __ldg(seq_lens + r);
    int blocks = (length + 63) >> 6;
    int begin = max(low - at, 0), end = min(high - at, blocks);
    return {begin * 2, min(end * 2, (length + 31) >> 5), length, end - begin == blocks};
}

// Half of what two groups have is put together by each of them.
template <int G>
__device__ __forceinline__ void finish(
    float (&acc)[16][4], float best0, float best1, float total0, float total1, u32 exchange, u32 stats, int w, int lane,
    bool whole, u16* out, float* partial, float* partial_lse, int row0
) {
    constexpr int OTHER = (1 - G) * 8, MINE = G * 8;
    int g = lane >> 2, q = lane & 3;
    if (w == 0 && q == 0) {
        write1(stats + (G * 32 + g) * 4, best0);
        write1(stats + (G * 32 + g + 8) * 4, best1);
        write1(stats + (G * 32 + 16 + g) * 4, total0);
        write1(stats + (G * 32 + 24 + g) * 4, total1);
    }
    named_sync(3, 256);
#pragma unroll
    for (int t = 0; t < 8; t++) {
        float* a = acc[OTHER + t];
        write4(exchange + (((G * 4 + w) * 8 + t) * 32 + lane) * 16, a[0], a[1], a[2], a[3]);
    }
    named_sync(3, 256);
    float other0 = read1(stats + ((1 - G) * 32 + g) * 4), other1 = read1(stats + ((1 - G) * 32 + g + 8) * 4);
    float sum0 = read1(stats + ((1 - G) * 32 + 16 + g) * 4), sum1 = read1(stats + ((1 - G) * 32 + 24 + g) * 4);
    float peak0 = fmaxf(best0, other0), peak1 = fmaxf(best1, other1);
    float a0 = exp2_of(best0 - peak0), a1 = exp2_of(best1 - peak1);
    float b0 = exp2_of(other0 - peak0), b1 = exp2_of(other1 - peak1);
    float l0 = G == 0 ? total0 * a0 + sum0 * b0 : sum0 * b0 + total0 * a0;
    float l1 = G == 0 ? total1 * a1 + sum1 * b1 : sum1 * b1 + total1 * a1;
    if (!whole && w == 0 && q == 0 && G == 0) {
        if (row0 + g < HEADS) partial_lse[row0 + g] = peak0 + log2f(l0);
        if (row0 + g + 8 < HEADS) partial_lse[row0 + g + 8] = peak1 + log2f(l1);
    }
    float back = PACKED ? BIG : 1.0f;
    float i0 = back / l0, i1 = back / l1;
    a0 *= i0, b0 *= i0, a1 *= i1, b1 *= i1;
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
        float v[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float4 o = read4(exchange + ((((1 - G) * 4 + w) * 8 + t + j) * 32 + lane) * 16);
            float* a = acc[MINE + t + j];
            v[j][0] = a[0] * a0 + o.x * b0, v[j][1] = a[1] * a0 + o.y * b0;
            v[j][2] = a[2] * a1 + o.z * b1, v[j][3] = a[3] * a1 + o.w * b1;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row0 + g + h * 8;
            if (row < HEADS) {
                long at = (long)row * 512 + w * 128 + (MINE + t) * 8;
                float x = v[0][h * 2], y = v[0][h * 2 + 1], z = v[1][h * 2], u = v[1][h * 2 + 1];
#if PACKED
                if (whole) *(uint2*)(out + at + q * 4) = make_uint2(pack(x, z), pack(y, u));
                else *(float4*)(partial + at + q * 4) = make_float4(x, z, y, u);
#else
                if (whole) {
                    *(u32*)(out + at + q * 2) = pack(x, y);
                    *(u32*)(out + at + 8 + q * 2) = pack(z, u);
                } else {
                    *(float2*)(partial + at + q * 2) = make_float2(x, y);
                    *(float2*)(partial + at + 8 + q * 2) = make_float2(z, u);
                }
#endif
            }
        }
    }
    named_sync(3, 256);
}

extern "C" __global__ void __launch_bounds__(288, 1) few(
    const __grid_constant__ Map map, const u16* __restrict__ q, const u8* __restrict__ latent, u16* out, float* partial,
    float* partial_lse, const int* __restrict__ starts, const int* __restrict__ firsts,
    const int* __restrict__ seq_lens, const int* __restrict__ tables, long table_row, int requests, float scale
) {
    extern __shared__ __align__(1024) u8 memory[];
    begin_next();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 ring = (shared_at(memory) + 1023) & ~1023u;
    const u32 exchange = ring + RING, stats = exchange + EXCHANGE, full = stats + 256, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 4);
        fence_async();
    }
    const int part = blockIdx.x / ROW_BLOCKS, row0 = blockIdx.x % ROW_BLOCKS * 16;
    const int payload = __ldg(starts + requests + 1), low = part * payload, high = low + payload;
    const int first = __ldg(firsts + part), last = min(__ldg(firsts + part + 1) + 1, requests);
    if (AHEAD && warp == 8 && first < last) {  // into the L2, where what is still being written will be seen as well
        Span a = span(first, low, high, starts, seq_lens);
        int i = a.begin + lane;
        if (lane < AHEAD && i < a.end) {
            const u8* from = latent + ((long)__ldg(tables + first * table_row + (i >> 1)) * 2 + (i & 1)) * STAGE;
            prefetch(from, STAGE);
        }
    }
    __syncthreads();
    wait_previous();
    if (warp == 8) {
        int n = 0;
        for (int r = first; r < last; r++) {
            Span a = span(r, low, high, starts, seq_lens);
            int mine = 0;
            for (int i = a.begin; i < a.end; i++, n++) {
                int p = (i - a.begin) >> 1;
                if ((i & 1) == 0 && (p & 31) == 0) {
                    int at = (i >> 1) + lane;
                    mine = at * 2 < a.end ? __ldg(tables + r * table_row + at) : 0;
                }
                int page = __shfl_sync(0xffffffffu, mine, p & 31);
                int s = n % STAGES;
                if (lane == 0) {
                    u32 to = ring + s * STAGE, barrier = full + s * 8;
                    barrier_wait(empty + s * 8, ((n / STAGES) & 1) ^ 1);
                    barrier_expect(barrier, STAGE);
                    int row = page * 64 + (i & 1) * 32;
#if PACKED
                    copy_flat(to, latent + (long)row * ROW, STAGE, barrier);
#else
                    copy_rows(to, &map, row, barrier);
#endif
                }
                __syncwarp();
            }
        }
        return;
    }
    const int group = warp >> 2, w = warp & 3, g = lane >> 2, kq = lane & 3;
    const u32 mail = exchange + group * 2 * 8192;
    int n = 0, turn = 0;
    for (int r = first; r < last; r++) {
        Span a = span(r, low, high, starts, seq_lens);
        if (a.begin >= a.end) continue;
        u32 query[9][4];
        {
            const u16* from = q + ((long)r * HEADS + row0) * 576;
            bool has0 = row0 + g < HEADS, has1 = row0 + g + 8 < HEADS;
            const u16 *from0 = from + g * 576, *from1 = from0 + 8 * 576;
#pragma unroll
            for (int k = 0; k < 9; k++) {
                int column = k < 8 ? w * 128 + k * 16 : 512 + w * 16;
                if (PACKED && k < 8) {  // columns 0 2 | 1 3 of four, as `odd_bytes` and `even_bytes` have them
                    uint2 x = has0 ? *(const uint2*)(from0 + column + kq * 4) : make_uint2(0, 0);
                    uint2 y = has1 ? *(const uint2*)(from1 + column + kq * 4) : make_uint2(0, 0);
                    query[k][0] = enlarge(__byte_perm(x.x, x.y, 0x5410));
                    query[k][1] = enlarge(__byte_perm(y.x, y.y, 0x5410));
                    query[k][2] = enlarge(__byte_perm(x.x, x.y, 0x7632));
                    query[k][3] = enlarge(__byte_perm(y.x, y.y, 0x7632));
                } else {
                    query[k][0] = has0 ? *(const u32*)(from0 + column + kq * 2) : 0;
                    query[k][1] = has1 ? *(const u32*)(from1 + column + kq * 2) : 0;
                    query[k][2] = has0 ? *(const u32*)(from0 + column + kq * 2 + 8) : 0;
                    query[k][3] = has1 ? *(const u32*)(from1 + column + kq * 2 + 8) : 0;
                }
            }
        }
        float acc[16][4];
#pragma unroll
        for (int t = 0; t < 16; t++) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0.0f;
        float best0 = -INFINITE, best1 = -INFINITE, total0 = 0.0f, total1 = 0.0f;
        for (int i = a.begin + ((group ^ n) & 1); i < a.end; i += 2) {
            int k = n + i - a.begin, s = k % STAGES;
            u32 base = ring + s * STAGE;
            barrier_wait(full + s * 8, (k / STAGES) & 1);
            float x[4][4];
#pragma unroll
            for (int t = 0; t < 4; t++) x[t][0] = x[t][1] = x[t][2] = x[t][3] = 0.0f;
            int valid = a.length - i * 32;
#if PACKED
            float factor[8];
            {
                u32 at = base + lane * 656 + w * 128;
#pragma unroll
                for (int k8 = 0; k8 < 8; k8++) {
                    u32 b[4];
                    load4(b, at + k8 * 16);
#pragma unroll
                    for (int t = 0; t < 4; t++) mma(x[t], query[k8], even_bytes(b[t]), odd_bytes(b[t]));
                }
#pragma unroll
                for (int t = 0; t < 8; t++) {
                    int token = (t >> 1) * 8 + kq * 2 + (t & 1);
                    float f = read1(base + token * 656 + 512 + w * 4) * BIG;
                    factor[t] = token < valid ? f : 0.0f;
                }
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    x[t][0] *= factor[t * 2], x[t][1] *= factor[t * 2 + 1];
                    x[t][2] *= factor[t * 2], x[t][3] *= factor[t * 2 + 1];
                }
                u32 rope = base + ((lane & 7) + (lane >> 4) * 8) * 656 + 528 + w * 32 + ((lane >> 3) & 1) * 16;
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    u32 b[4];
                    load4(b, rope + u * 16 * 656);
                    mma(x[2 * u], query[8], b[0], b[1]);
                    mma(x[2 * u + 1], query[8], b[2], b[3]);
                }
            }
#else
            {
                u32 at = base + ((lane & 7) + (lane >> 4) * 8) * 128;
#pragma unroll
                for (int k9 = 0; k9 < 9; k9++) {
                    u32 tile = k9 < 8 ? (w * 2 + (k9 >> 2)) * 4096 : 8 * 4096;
                    u32 chunk = (k9 < 8 ? (k9 & 3) * 2 : w * 2) + ((lane >> 3) & 1);
                    u32 from = at + tile + ((chunk ^ (lane & 7)) << 4);
#pragma unroll
                    for (int u = 0; u < 2; u++) {
                        u32 b[4];
                        load4(b, from + u * 2048);
                        mma(x[2 * u], query[k9], b[0], b[1]);
                        mma(x[2 * u + 1], query[k9], b[2], b[3]);
                    }
                }
            }
#endif
            u32 box = mail + (turn & 1) * 8192;
            turn++;
#pragma unroll
            for (int t = 0; t < 4; t++) write4(box + ((w * 4 + t) * 32 + lane) * 16, x[t][0], x[t][1], x[t][2], x[t][3]);
            named_sync(1 + group, 128);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                float4 sum = read4(box + (t * 32 + lane) * 16);
#pragma unroll
                for (int o = 1; o < 4; o++) {
                    float4 v = read4(box + ((o * 4 + t) * 32 + lane) * 16);
                    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                }
                x[t][0] = sum.x, x[t][1] = sum.y, x[t][2] = sum.z, x[t][3] = sum.w;
            }
            if (valid < 32) {
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    int token = t * 8 + kq * 2;
                    if (token >= valid) x[t][0] = x[t][2] = -INFINITE;
                    if (token + 1 >= valid) x[t][1] = x[t][3] = -INFINITE;
                }
#if !PACKED
                for (int row = valid + (lane >> 4); row < 32; row += 2)  // what no token has written may be NaN
                    write4(base + (w * 2 + ((lane >> 3) & 1)) * 4096 + row * 128 + (lane & 7) * 16, 0, 0, 0, 0);
                __syncwarp();
#endif
            }
            float peak0 = fmaxf(x[0][0], x[0][1]), peak1 = fmaxf(x[0][2], x[0][3]);
#pragma unroll
            for (int t = 1; t < 4; t++) {
                peak0 = fmaxf(peak0, fmaxf(x[t][0], x[t][1]));
                peak1 = fmaxf(peak1, fmaxf(x[t][2], x[t][3]));
            }
            peak0 = fmaxf(peak0, __shfl_xor_sync(0xffffffffu, peak0, 1));
            peak1 = fmaxf(peak1, __shfl_xor_sync(0xffffffffu, peak1, 1));
            peak0 = fmaxf(peak0, __shfl_xor_sync(0xffffffffu, peak0, 2));
            peak1 = fmaxf(peak1, __shfl_xor_sync(0xffffffffu, peak1, 2));
            peak0 = fmaxf(best0, peak0 * scale), peak1 = fmaxf(best1, peak1 * scale);
            float fade0 = exp2_of(best0 - peak0), fade1 = exp2_of(best1 - peak1);
            bool same = best0 == peak0 && best1 == peak1;
            best0 = peak0, best1 = peak1;
            float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
            for (int t = 0; t < 4; t++) {
                x[t][0] = exp2_of(x[t][0] * scale - peak0), x[t][1] = exp2_of(x[t][1] * scale - peak0);
                x[t][2] = exp2_of(x[t][2] * scale - peak1), x[t][3] = exp2_of(x[t][3] * scale - peak1);
                sum0 += x[t][0] + x[t][1], sum1 += x[t][2] + x[t][3];
            }
            total0 = total0 * fade0 + sum0, total1 = total1 * fade1 + sum1;
            if (!__all_sync(0xffffffffu, same)) {
#pragma unroll
                for (int t = 0; t < 16; t++) acc[t][0] *= fade0, acc[t][1] *= fade0, acc[t][2] *= fade1, acc[t][3] *= fade1;
            }
#if PACKED
#pragma unroll
            for (int t = 0; t < 4; t++) {
                x[t][0] *= factor[t * 2], x[t][1] *= factor[t * 2 + 1];
                x[t][2] *= factor[t * 2], x[t][3] *= factor[t * 2 + 1];
            }
#endif
            u32 weights[2][4];
#pragma unroll
            for (int u = 0; u < 2; u++) {
                weights[u][0] = pack(x[2 * u][0], x[2 * u][1]), weights[u][1] = pack(x[2 * u][2], x[2 * u][3]);
                weights[u][2] = pack(x[2 * u + 1][0], x[2 * u + 1][1]);
                weights[u][3] = pack(x[2 * u + 1][2], x[2 * u + 1][3]);
            }
#if PACKED
            u32 at = base + lane * 656 + w * 128;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 b[4];
                load4_turned(b, at + j * 16);
                mma(acc[2 * j], weights[0], even_bytes(b[0]), even_bytes(b[1]));
                mma(acc[2 * j + 1], weights[0], odd_bytes(b[0]), odd_bytes(b[1]));
                mma(acc[2 * j], weights[1], even_bytes(b[2]), even_bytes(b[3]));
                mma(acc[2 * j + 1], weights[1], odd_bytes(b[2]), odd_bytes(b[3]));
            }
#else
            u32 at = base + w * 8192 + ((lane & 7) + ((lane >> 3) & 1) * 8) * 128;
#pragma unroll
            for (int u = 0; u < 2; u++) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    u32 b[4];
                    u32 chunk = (j & 3) * 2 + (lane >> 4);
                    load4_turned(b, at + (j >> 2) * 4096 + u * 2048 + ((chunk ^ (lane & 7)) << 4));
                    mma(acc[2 * j], weights[u], b[0], b[1]);
                    mma(acc[2 * j + 1], weights[u], b[2], b[3]);
                }
            }
            if (valid < 32) fence_async();
#endif
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + s * 8);
        }
        total0 += __shfl_xor_sync(0xffffffffu, total0, 1), total1 += __shfl_xor_sync(0xffffffffu, total1, 1);
        total0 += __shfl_xor_sync(0xffffffffu, total0, 2), total1 += __shfl_xor_sync(0xffffffffu, total1, 2);
        long slot = part * 2 + (r == first ? 0 : 1);
        u16* to = out + (long)r * HEADS * 512;
        float *part_of = partial + slot * HEADS * 512, *lse = partial_lse + slot * HEADS;
        if (group == 0)
            finish<0>(acc, best0, best1, total0, total1, exchange, stats, w, lane, a.whole, to, part_of, lse, row0);
        else
            finish<1>(acc, best0, best1, total0, total1, exchange, stats, w, lane, a.whole, to, part_of, lse, row0);
        n += a.end - a.begin;
    }
}

// Merge: 256 threads; SPLIT columns apart (1 or 4).
template <int SPLIT>
__device__ __forceinline__ void merge_of(
    const float* __restrict__ partial, const float* __restrict__ partial_lse, u16* out, const int* __restrict__ starts,
    const int* __restrict__ firsts, const int* __restrict__ seq_lens, int requests, int by_part
) {
    constexpr int WIDE = 128 / SPLIT;              // threads for the columns
    constexpr int GROUPS = SPLIT == 4 ? 8 : 1;     // parts at once
    constexpr int ROWS = 256 / (WIDE * GROUPS);    // heads of a program
    __shared__ float4 sums[GROUPS > 1 ? 256 : 1];
    begin_next();
    int r = blockIdx.x;
    if (by_part) r = __ldg(firsts + blockIdx.x + 1);
    int begin = 0, end = 0, second = 0;
    if (r < requests) {
        int payload = __ldg(starts + requests + 1), at = __ldg(starts + r) + OVERHEAD;
        int blocks = (__ldg(seq_lens + r) + 63) >> 6;
        begin = at / payload, end = (at + blocks - 1) / payload + 1;
        second = __ldg(firsts + begin) == r ? 0 : 1;
    }
    wait_previous();
    if (end - begin < 2 || (by_part && begin != blockIdx.x)) return;
    int t = threadIdx.x, group = t / WIDE % GROUPS, column = (blockIdx.z * WIDE + t % WIDE) * 4;
    int h = blockIdx.y * ROWS + t / (WIDE * GROUPS);
    bool there = h < HEADS;
    h = min(h, HEADS - 1);
    float best = -INFINITE, total = 0.0f;
    float4 acc = make_float4(0, 0, 0, 0);
    constexpr int AT_ONCE = 8;
    for (int p = begin + group; p < end; p += GROUPS * AT_ONCE) {
        float lse[AT_ONCE];
        float4 v[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            int x = p + i * GROUPS;
            long slot = x * 2 + (x == begin ? second : 0);
            bool is = x < end;
            lse[i] = is ? __ldcg(partial_lse + slot * HEADS + h) : -INFINITE;
            v[i] = is ? __ldcg((const float4*)(partial + (slot * HEADS + h) * 512 + column)) : make_float4(0, 0, 0, 0);
        }
        float peak = best;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) peak = fmaxf(peak, lse[i]);
        float fade = exp2_of(best - peak);
        total *= fade, acc.x *= fade, acc.y *= fade, acc.z *= fade, acc.w *= fade;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            float weight = exp2_of(lse[i] - peak);
            total += weight;
            acc.x += v[i].x * weight, acc.y += v[i].y * weight, acc.z += v[i].z * weight, acc.w += v[i].w * weight;
        }
        best = peak;
    }
    if (GROUPS > 1) {
        __shared__ float stats[GROUPS][2];
        sums[t] = acc;
        if (t % WIDE == 0) stats[group][0] = best, stats[group][1] = total;
        __syncthreads();
        if (t >= WIDE) return;
        float peak = -INFINITE;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) peak = fmaxf(peak, stats[i][0]);
        total = 0.0f, acc = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            float weight = exp2_of(stats[i][0] - peak);
            float4 v = sums[i * WIDE + t];
            total += stats[i][1] * weight;
            acc.x += v.x * weight, acc.y += v.y * weight, acc.z += v.z * weight, acc.w += v.w * weight;
        }
    }
    float inverse = 1.0f / total;
    if (there)
        *(uint2*)(out + ((long)r * HEADS + h) * 512 + column) =
            make_uint2(pack(acc.x * inverse, acc.y * inverse), pack(acc.z * inverse, acc.w * inverse));
}

#define MERGE_ARGS                                                                                                     \
    const float *partial, const float *partial_lse, u16 *out, const int *starts, const int *firsts,                    \
        const int *seq_lens, int requests, int by_part
extern "C" __global__ void __launch_bounds__(256) merge1(MERGE_ARGS) {
    merge_of<1>(partial, partial_lse, out, starts, firsts, seq_lens, requests, by_part);
}
extern "C" __global__ void __launch_bounds__(256) merge4(MERGE_ARGS) {
    merge_of<4>(partial, partial_lse, out, starts, firsts, seq_lens, requests, by_part);
}
