//! Kernels that do nothing wrong.

use anyhow::Result;

use crate::gpu::{compile, cudarc, grid, run, stream};
use cudarc::driver::LaunchConfig;
use cudarc::nvrtc::compile_ptx;

#[test]
fn blocks_reduce_with_shuffles_shared_memory_and_wide_loads() -> Result<()> {
    let stream = stream()?;
    let kernel = compile(
        &stream,
        r#"
        template <class T> __device__ __forceinline__ T sum_of_warp(T x) {
            for (int lanes = 16; lanes; lanes /= 2)
                x += __shfl_down_sync(0xffffffff, x, lanes);
            return x;
        }

        extern "C" __global__ void __launch_bounds__(128) k(float *__restrict__ data, int length) {
            extern __shared__ __align__(16) float sums[];
            __shared__ unsigned count;
            if (threadIdx.x == 0)
                count = 0;
            float sum = 0;
            for (int i = threadIdx.x; i < length / 4; i += blockDim.x) {
                float4 x = reinterpret_cast<const float4 *>(data)[i];
                sum += x.x + x.y + x.z + x.w;
            }
            sum = sum_of_warp(sum);
            if (threadIdx.x % warpSize == 0)
                sums[threadIdx.x / warpSize] = sum;
            if (__syncthreads_or(threadIdx.x == 77))
                atomicAdd(&count, 1u);
            __syncthreads();
            if (threadIdx.x < 32) {
                sum = sum_of_warp(threadIdx.x < blockDim.x / warpSize ? sums[threadIdx.x] : 0.0f);
                unsigned even = __ballot_sync(0xffffffff, threadIdx.x % 2 == 0);
                if (threadIdx.x == 0) {
                    data[0] = sum;
                    data[1] = count;
                    data[2] = __popc(even);
                }
            }
        }"#,
    )?;
    let values: Vec<f32> = (0..1000).map(|i| (i % 10) as f32).collect();
    let mut data = stream.clone_htod(&values)?;
    run(&stream, &kernel, LaunchConfig { shared_mem_bytes: 16, ..grid(1, 128) }, &mut data)?;
    assert_eq!(stream.clone_dtoh(&data)?[..3], [4500., 128., 16.]);
    Ok(())
}

#[test]
fn a_lane_leaves_and_the_others_go_on() -> Result<()> {
    let stream = stream()?;
    let kernel = compile(
        &stream,
        r#"extern "C" __global__ void k(float *data, int length) {
            if (threadIdx.x >= length)
                return;
            unsigned group = 0xffu << threadIdx.x / 8 * 8;
            float x = __shfl_xor_sync(group, float(threadIdx.x), 7, 8);
            __syncthreads();
            data[threadIdx.x] = x + __reduce_add_sync(group, 1u);
        }"#,
    )?;
    let mut data = stream.alloc_zeros::<f32>(24)?;
    run(&stream, &kernel, grid(1, 64), &mut data)?;
    let expected: Vec<f32> = (0..24).map(|i| (i ^ 7) as f32 + 8.).collect();
    assert_eq!(stream.clone_dtoh(&data)?, expected);
    Ok(())
}

#[test]
fn fresh_memory_is_garbage() -> Result<()> {
    let stream = stream()?;
    // SAFETY: a float may have any bits.
    let data = unsafe { stream.alloc::<f32>(100) }?;
    assert!(stream.clone_dtoh(&data)?.iter().all(|x| x.is_nan()));
    Ok(())
}

#[test]
fn a_copy_to_shared_memory_is_garbage_until_it_is_waited_for() -> Result<()> {
    let stream = stream()?;
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        __shared__ __align__(16) float fours[128], ones[32];
        int i = threadIdx.x;
        unsigned to = __cvta_generic_to_shared(&fours[4 * i]), one = __cvta_generic_to_shared(&ones[i]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     : : "r"(to), "l"(data + 4 * i), "r"(i != 5 ? 16u : 0u) : "memory");
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     : : "r"(one), "l"(data + i), "r"(i != 6 ? 4u : 0u) : "memory");
        float before = fours[4 * i + 1], one_before = ones[i];
        asm volatile("cp.async.wait_all;" : : : "memory");
        __syncthreads();
        data[i] = before == before || one_before == one_before;
        data[32 + i] = fours[4 * (31 - i) + 3];
        data[64 + i] = ones[31 - i];
    }"#;
    let kernel = compile(&stream, source)?;
    let values: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let mut data = stream.clone_htod(&values)?;
    run(&stream, &kernel, grid(1, 32), &mut data)?;
    let data = stream.clone_dtoh(&data)?;
    assert_eq!(data[..32], [0.0; 32]);
    for i in 0..32 {
        let from = 31 - i;
        let four = if from == 5 { 0.0 } else { (4 * from + 3) as f32 };
        let one = if from == 6 { 0.0 } else { from as f32 };
        assert_eq!([data[32 + i], data[64 + i]], [four, one], "{i}");
    }
    Ok(())
}

/// PTX's own picture of m16n8k16: which row and column of which matrix each half of each register is.
#[test]
fn matrices_are_multiplied_from_registers_as_ptx_lays_them_out() -> Result<()> {
    let stream = stream()?;
    let source = r#"
    __device__ unsigned pair(float low, float high) {
        unsigned both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    extern "C" __global__ void k(float *data, int length) {
        int lane = threadIdx.x, group = lane >> 2, in_group = lane % 4;
        const float *a = data, *b = data + 256; // (16, 16) and (16, 8), row by row
        float *c = data + 384;                  // (16, 8)
        unsigned left[4], right[2];
        for (int i = 0; i < 4; i++) {
            int row = i % 2 == 0 ? group : group + 8, column = in_group * 2 + (i < 2 ? 0 : 8);
            left[i] = pair(a[row * 16 + column], a[row * 16 + column + 1]);
        }
        for (int i = 0; i < 2; i++) {
            int row = in_group * 2 + i * 8;
            right[i] = pair(b[row * 8 + group], b[(row + 1) * 8 + group]);
        }
        float d[4], *at[4];
        for (int i = 0; i < 4; i++) {
            at[i] = c + (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1);
            d[i] = *at[i];
        }
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
        for (int i = 0; i < 4; i++) *at[i] = d[i];
    }"#;
    let kernel = compile(&stream, source)?;
    let values: Vec<f32> = (0..512).map(|i| ((i * 37 + i / 7) % 23) as f32 - 11.0).collect();
    let mut data = stream.clone_htod(&values)?;
    run(&stream, &kernel, grid(1, 32), &mut data)?;
    let (a, b, c) = (&values[..256], &values[256..384], &values[384..]);
    let expected = (0..128).map(|i| {
        let (row, column) = (i / 8, i % 8);
        c[i] + (0..16).map(|k| a[row * 16 + k] * b[k * 8 + column]).sum::<f32>()
    });
    assert_eq!(stream.clone_dtoh(&data)?[384..], expected.collect::<Vec<_>>());
    Ok(())
}

/// PTX's own picture of m16n8k8, and of rounding to TF32: to nearest, ties away from zero.
#[test]
fn matrices_of_tf32_are_multiplied_as_ptx_lays_them_out() -> Result<()> {
    let stream = stream()?;
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        int lane = threadIdx.x, group = lane >> 2, in_group = lane % 4;
        const float *a = data, *b = data + 128; // (16, 8) and (8, 8), row by row
        float *c = data + 192;                  // (16, 8)
        unsigned left[4], right[2];
        for (int i = 0; i < 4; i++) {
            int row = i % 2 == 0 ? group : group + 8, column = in_group + (i < 2 ? 0 : 4);
            asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(left[i]) : "f"(a[row * 8 + column]));
        }
        // Bits below TF32's count for nothing.
        for (int i = 0; i < 2; i++) right[i] = __float_as_uint(b[(in_group + i * 4) * 8 + group]) | 0x1fff;
        float d[4], *at[4];
        for (int i = 0; i < 4; i++) {
            at[i] = c + (i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1);
            d[i] = *at[i];
        }
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
        for (int i = 0; i < 4; i++) *at[i] = d[i];
    }"#;
    let kernel = compile(&stream, source)?;
    let mut values: Vec<f32> = (0..320).map(|i| ((i * 37 + i / 7) % 23) as f32 - 11.0).collect();
    // Between two numbers of TF32, and just below the middle.
    (values[0], values[9]) = (1.0 + 1.0 / 2048.0, -1.0 - 1.0 / 2048.0 + 1.0 / 8192.0);
    let mut data = stream.clone_htod(&values)?;
    run(&stream, &kernel, grid(1, 32), &mut data)?;
    (values[0], values[9]) = (1.0 + 1.0 / 1024.0, -1.0);
    let (a, b, c) = (&values[..128], &values[128..192], &values[192..]);
    let expected = (0..128).map(|i| {
        let (row, column) = (i / 8, i % 8);
        c[i] + (0..8).map(|k| a[row * 8 + k] * b[k * 8 + column]).sum::<f32>()
    });
    assert_eq!(stream.clone_dtoh(&data)?[192..], expected.collect::<Vec<_>>());
    Ok(())
}

#[test]
fn ptx_that_is_not_emulated_or_has_other_operands_does_not_compile() {
    let compiles = |asm: &str| {
        let source = format!(
            "extern \"C\" __global__ void k(float *x, unsigned short *y) {{ asm({asm}); }}"
        );
        compile_ptx(source).is_ok()
    };
    assert!(compiles(r#""cvt.rn.f16.f32 %0, %1;" : "=h"(*y) : "f"(*x)"#));
    for wrong in [
        r#""cvt.rz.f16.f32 %0, %1;" : "=h"(*y) : "f"(*x)"#,
        r#""cvt.rn.f16.f32 %0;" : "=h"(*y) : "f"(*x)"#,
        r#""cvt.rn.f16.f32 {%0}, %1;" : "=h"(*y) : "f"(*x)"#,
        r#""cvt.rn.f16.f32 %0, %1;" : "=r"(*y) : "f"(*x)"#,
        r#""cvt.rn.f16.f32 %0, %1;" : "=h"(*y) : "f"(*y)"#,
    ] {
        assert!(!compiles(wrong), "{wrong}");
    }
}

#[test]
fn modules_have_variables_of_their_own() -> Result<()> {
    let stream = stream()?;
    let source = r#"__device__ float total[2];
    extern "C" __global__ void k(float *data, int length) {
        atomicAdd(&total[1], data[threadIdx.x]);
        data[threadIdx.x] = total[1];
    }"#;
    let kernels = [compile(&stream, source)?, compile(&stream, source)?];
    for kernel in kernels {
        let mut data = stream.clone_htod(&[1f32, 2., 3.])?;
        run(&stream, &kernel, grid(1, 1), &mut data)?;
        run(&stream, &kernel, grid(1, 3), &mut data)?;
        assert_eq!(stream.clone_dtoh(&data)?, [2., 4., 7.]);
    }
    Ok(())
}

/// As programs and tests do whose threads all begin with the same kernel.
#[test]
fn threads_compile_one_source_at_the_same_time() {
    let source = format!(
        "// not in the cache: {} {:?}\nextern \"C\" __global__ void k(float *x, int n) {{}}",
        std::process::id(),
        std::time::SystemTime::now()
    );
    std::thread::scope(|scope| {
        let compiled: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| compile_ptx(&source).map_err(|error| error.to_string())))
            .collect();
        for thread in compiled {
            let ptx = thread.join().expect("no panic").expect("compiles");
            assert!(ptx.to_src().contains("// object "));
        }
    });
}

#[test]
fn nvrtc_tells_what_it_lacks() {
    let missing = |source: &str| compile_ptx(source).expect_err("should not compile").to_string();
    let kernel = |text: &str| format!("{text}\nextern \"C\" __global__ void k() {{}}");
    assert!(missing(&kernel("#include <cuda_fp16.h>")).contains("cuda_fp16.h"));
    assert!(missing(&kernel("uint32_t x;")).contains("uint32_t"));
    assert!(missing("extern \"C\" __global__ void k() { none(); }").contains("default_program:1:"));
}
