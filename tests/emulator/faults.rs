//! What kernels do wrong, and how it is told.
//!
//! A fault makes the device useless to the whole process: each has one of its own.

use anyhow::Result;

use crate::gpu::{CHILD, assert_error, child, compile, cudarc, grid, run, stream};
use cudarc::driver::sys::CUmemPool_attribute::{
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH,
};
use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{DevicePtr, LaunchConfig, PushKernelArg};

/// Runs a test in a process of its own, and returns what that prints: nothing in that process.
fn in_process(test: &str, seed: u32) -> Option<String> {
    in_child(test, &[("EMULATED_GPU_SEED", &seed.to_string())])
}

fn in_child(test: &str, variables: &[(&str, &str)]) -> Option<String> {
    child(&format!("faults::{test}"), variables)
}

/// Runs a kernel with `length` numbers, which shall fail with `error` and say `message`.
fn fails(
    test: &str,
    source: &str,
    config: LaunchConfig,
    length: usize,
    error: CUresult,
    message: &str,
) -> Result<()> {
    if let Some(text) = in_process(test, 0) {
        assert!(text.contains(message), "{text}");
        return Ok(());
    }
    let stream = stream()?;
    let kernel = compile(&stream, source)?;
    let mut data = stream.alloc_zeros::<f32>(length)?;
    assert_error(run(&stream, &kernel, config, &mut data), error);
    assert_error(stream.synchronize(), error); // it stays
    std::mem::forget(data);
    Ok(())
}

#[test]
fn an_idle_device_computes_nothing_and_counts_its_calls() -> Result<()> {
    let test = "an_idle_device_computes_nothing_and_counts_its_calls";
    let variables = [("EMULATED_GPU_IDLE", "1"), ("EMULATED_GPU_COUNT", "1")];
    if let Some(text) = in_child(test, &variables) {
        for (count, call) in [(3, "k"), (3, "cuLaunchKernel"), (2, "cuMemAllocAsync")] {
            let line = format!("emulated GPU: {count:9} {call}\n");
            assert!(text.contains(&line), "{line} is not in {text}");
        }
        return Ok(());
    }
    let stream = stream()?;
    let source = r#"extern "C" __global__ void k(float *data, int length) { data[0] = 1; }"#;
    let kernel = compile(&stream, source)?;
    let mut data = stream.clone_htod(&[5f32, 6.0])?;
    for _ in 0..3 {
        run(&stream, &kernel, grid(1, 1), &mut data)?;
    }
    assert_eq!(stream.clone_dtoh(&data)?, [5.0, 6.0]);
    drop(data);
    stream.alloc_zeros::<f32>(1 << 28)?; // nobody touches it
    Ok(())
}

#[test]
fn the_most_memory_that_was_in_use() -> Result<()> {
    let test = "the_most_memory_that_was_in_use";
    if in_process(test, 0).is_some() {
        return Ok(());
    }
    let stream = stream()?;
    let mut pool = std::ptr::null_mut();
    // SAFETY: the device is there, and `pool` is there to be written.
    unsafe { sys::cuDeviceGetMemPool(&raw mut pool, stream.context().cu_device()) }.result()?;
    let used = |attribute| -> Result<u64> {
        let mut bytes = 0u64;
        // SAFETY: these attributes are 64 bits.
        unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) }.result()?;
        Ok(bytes)
    };
    let (now, most) = (CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH);
    let before = used(now)?;
    let kept = stream.alloc_zeros::<u8>(1000)?;
    drop(stream.alloc_zeros::<u8>(5000)?);
    drop(stream.alloc_zeros::<u8>(3000)?);
    assert_eq!((used(now)? - before, used(most)? - before), (1000, 6000));
    let mut none = 0u64;
    // SAFETY: as above.
    unsafe { sys::cuMemPoolSetAttribute(pool, most, (&raw mut none).cast()) }.result()?;
    assert_eq!(used(most)? - before, 1000);
    drop(kept);
    assert_eq!((used(now)? - before, used(most)? - before), (0, 1000));
    Ok(())
}

#[test]
fn a_write_beyond_the_end() -> Result<()> {
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        data[blockIdx.x * blockDim.x + threadIdx.x] = 1;
    }"#;
    let error = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    let message = "block (3, 0, 0), thread (4, 0, 0): \
        access 0 bytes after the end of an allocation of 400 bytes";
    fails("a_write_beyond_the_end", source, grid(4, 32), 100, error, message)
}

#[test]
fn a_load_that_is_not_aligned() -> Result<()> {
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        float4 x = *reinterpret_cast<float4 *>(data + 1);
        data[0] = x.x;
    }"#;
    let error = CUresult::CUDA_ERROR_MISALIGNED_ADDRESS;
    fails(
        "a_load_that_is_not_aligned",
        source,
        grid(1, 1),
        100,
        error,
        "is not aligned to 16 bytes",
    )
}

#[test]
fn an_index_beyond_shared_memory() -> Result<()> {
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        __shared__ float tile[8][33];
        tile[threadIdx.x / 4][threadIdx.x] = 1;
        __syncthreads();
        data[threadIdx.x] = tile[0][threadIdx.x];
    }"#;
    let error = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    fails(
        "an_index_beyond_shared_memory",
        source,
        grid(1, 33),
        100,
        error,
        "index 8 is out of its array",
    )
}

#[test]
fn a_product_of_a_warp_that_some_have_left() -> Result<()> {
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        if (threadIdx.x == 5)
            return;
        float sums[4] = {}, *s = sums;
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(s[0]), "=f"(s[1]), "=f"(s[2]), "=f"(s[3])
            : "r"(0u), "r"(0u), "r"(0u), "r"(0u), "r"(0u), "r"(0u), "f"(s[0]), "f"(s[1]), "f"(s[2]), "f"(s[3]));
        data[threadIdx.x] = s[0];
    }"#;
    fails(
        "a_product_of_a_warp_that_some_have_left",
        source,
        grid(1, 32),
        32,
        CUresult::CUDA_ERROR_LAUNCH_FAILED,
        "mma.sync needs all lanes of a warp, and has 0xffffffdf",
    )
}

#[test]
fn a_barrier_that_some_never_reach() -> Result<()> {
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        if (threadIdx.x < 16)
            __syncthreads();
        else
            __syncwarp();
    }"#;
    let error = CUresult::CUDA_ERROR_LAUNCH_FAILED;
    let message = "16 at a barrier, 16 at a warp function";
    fails("a_barrier_that_some_never_reach", source, grid(1, 32), 1, error, message)
}

/// A kernel without launch bounds may take all 255 registers, of which there are 65536 for a block.
#[test]
fn more_threads_than_a_kernel_without_launch_bounds_has_registers_for() -> Result<()> {
    if in_process("more_threads_than_a_kernel_without_launch_bounds_has_registers_for", 0).is_some()
    {
        return Ok(());
    }
    let stream = stream()?;
    let kernel = |bounds: &str| {
        let head = format!("extern \"C\" __global__ void {bounds}");
        compile(&stream, &format!("{head} k(float *data, int length) {{ data[threadIdx.x] = 1; }}"))
    };
    let mut data = stream.alloc_zeros::<f32>(512)?;
    run(&stream, &kernel("")?, grid(1, 256), &mut data)?;
    let error = CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    assert_error(run(&stream, &kernel("")?, grid(1, 257), &mut data), error);
    run(&stream, &kernel("__launch_bounds__(512)")?, grid(1, 512), &mut data)?;
    assert_eq!(stream.clone_dtoh(&data)?, [1.0; 512]);
    Ok(())
}

#[test]
fn an_assertion() -> Result<()> {
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        assert(length == 2);
    }"#;
    let error = CUresult::CUDA_ERROR_ASSERT;
    fails("an_assertion", source, grid(1, 1), 1, error, "assertion `length == 2` failed")
}

#[test]
fn a_write_between_allocation_and_guard() -> Result<()> {
    let test = "a_write_between_allocation_and_guard";
    if let Some(text) = in_process(test, 0) {
        assert!(text.contains("something wrote beyond the memory"), "{text}");
        return Ok(());
    }
    let stream = stream()?;
    let source = r#"extern "C" __global__ void k(float *data, int length) { data[length] = 1; }"#;
    let kernel = compile(&stream, source)?;
    let mut data = stream.alloc_zeros::<f32>(3)?;
    run(&stream, &kernel, grid(1, 1), &mut data)?;
    drop(data);
    assert_error(stream.synchronize(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    Ok(())
}

#[test]
fn a_wait_for_what_never_comes() -> Result<()> {
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        while (*(volatile float *)data == 0) {
        }
    }"#;
    let error = CUresult::CUDA_ERROR_LAUNCH_TIMEOUT;
    fails("a_wait_for_what_never_comes", source, grid(1, 1), 1, error, "EMULATED_GPU_TIMEOUT")
}

#[test]
fn memory_that_was_freed() -> Result<()> {
    if let Some(text) = in_process("memory_that_was_freed", 0) {
        assert!(text.contains("in an allocation of 400 bytes that has been freed"), "{text}");
        return Ok(());
    }
    let stream = stream()?;
    let source =
        r#"extern "C" __global__ void k(float **data, int length) { (*data)[length] = 1; }"#;
    let kernel = compile(&stream, source)?;
    let data = stream.alloc_zeros::<f32>(100)?;
    let address = data.device_ptr(&stream).0;
    let mut holder = stream.clone_htod(&[address])?;
    drop(data);
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&mut holder).arg(&1i32);
    // SAFETY: what it does that it may not is found before it does harm.
    let result = unsafe { launch.launch(grid(1, 1)) };
    assert_error(result, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    std::mem::forget(holder);
    Ok(())
}

#[test]
fn a_barrier_is_missing() -> Result<()> {
    // A thread reads what the one after it has yet to write, or already has.
    let source = r#"extern "C" __global__ void k(float *data, int length) {
        __shared__ float tile[64];
        tile[threadIdx.x] = threadIdx.x;
        data[threadIdx.x] = tile[threadIdx.x / 2];
    }"#;
    if std::env::var_os(CHILD).is_none() {
        let ran = |seed| in_process("a_barrier_is_missing", seed).expect("this is the parent");
        assert!(ran(0).contains("all is well"), "in ascending order, nobody notices");
        assert!((1..4).any(|seed| ran(seed).contains("a number is missing")));
        return Ok(());
    }
    let stream = stream()?;
    let kernel = compile(&stream, source)?;
    let mut data = stream.alloc_zeros::<f32>(64)?;
    run(&stream, &kernel, grid(1, 64), &mut data)?;
    let missing = stream.clone_dtoh(&data)?.iter().any(|x| x.is_nan());
    println!("{}", if missing { "a number is missing" } else { "all is well" });
    Ok(())
}

/// Runs a kernel with 64 numbers and 64 of them in shared memory where races are looked for; what is
/// said of it.
fn race(test: &str, body: &str, blocks: u32) -> Result<Option<String>> {
    if std::env::var_os(CHILD).is_none() {
        return Ok(in_child(test, &[("EMULATED_GPU_RACES", "1")]));
    }
    let source = format!(
        r#"extern "C" __global__ void k(float *data, int length) {{
            __shared__ float tile[64];
            int i = threadIdx.x;
            {body}
        }}"#
    );
    let stream = stream()?;
    let kernel = compile(&stream, &source)?;
    let mut data = stream.alloc_zeros::<f32>(64)?;
    match run(&stream, &kernel, grid(blocks, 64), &mut data) {
        Ok(()) => println!("all is well"),
        error => assert_error(error, CUresult::CUDA_ERROR_LAUNCH_FAILED),
    }
    std::mem::forget(data);
    Ok(None)
}

macro_rules! races {
    ($($name:ident: $blocks:literal, $body:literal, $said:literal;)*) => {$(
        #[test]
        fn $name() -> Result<()> {
            if let Some(text) = race(stringify!($name), $body, $blocks)? {
                assert!(text.contains($said), "{text}");
            }
            Ok(())
        }
    )*};
}

races! {
    a_race_without_a_barrier: 1, "tile[i] = i; data[i] = tile[i / 2];", "reads shared memory at";
    a_race_with_what_was_read: 1,
        "tile[i] = i; __syncthreads(); data[i] = tile[63 - i]; tile[i] = 0;", "which thread 31 of its block writes";
    a_race_of_lanes: 1, "tile[i] = i; data[i] = tile[i ^ 1];", "which thread 0 of its block reads";
    a_race_that_a_shuffle_orders_not: 1,
        "tile[i] = i; __shfl_sync(~0u, i, 0); data[i] = tile[i ^ 1];", "reads shared memory at";
    a_race_that_the_wrong_warp_waits_for: 1,
        "tile[i] = i; __syncwarp(); data[i] = tile[i ^ 32];", "writes shared memory at";
    a_race_of_blocks: 2, "data[i] = tile[i] = i;", "writes global memory at";
    a_race_with_an_atomic_operation: 1, "atomicAdd(data, 1); if (i == 63) data[0] = 0;", "global memory";
    a_race_with_a_copy_that_has_begun: 1,
        "float x = tile[63 - i]; emulated_copy_async(tile + i, data, 4, x == x); emulated_copies_arrived();",
        "reads shared memory at";
    a_race_with_a_copy_that_has_arrived_for_its_thread: 1,
        "emulated_copy_async(tile + i, data + i, 4, true); emulated_copies_arrived(); data[i] = tile[63 - i];",
        "writes shared memory at";
    no_race_with_copies: 1,
        "emulated_copy_async(tile + i, data + i, 4, true); emulated_copies_arrived(); __syncthreads();
         data[i] = tile[63 - i];", "all is well";
    no_race_with_barriers: 2,
        "tile[i] = i; __syncthreads(); float x = tile[63 - i]; __syncthreads(); tile[i] = x;", "all is well";
    no_race_of_lanes_that_wait: 1, "tile[i] = i; __syncwarp(); data[i] = tile[i ^ 1];", "all is well";
    no_race_of_atomic_operations: 3, "atomicAdd(data, 1); atomicAdd(tile, 1);", "all is well";
}

#[test]
fn launches_beyond_the_limits() -> Result<()> {
    let stream = stream()?;
    let source =
        r#"extern "C" __global__ void __launch_bounds__(64) k(float *data, int length) {}"#;
    let kernel = compile(&stream, source)?;
    let mut data = stream.alloc_zeros::<f32>(1)?;
    let mut launched = |config| run(&stream, &kernel, config, &mut data);
    let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
    assert_error(launched(grid(0, 1)), invalid);
    assert_error(launched(grid(1, 1025)), invalid);
    assert_error(launched(grid(1, 65)), CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    assert_error(launched(LaunchConfig { grid_dim: (1, 65536, 1), ..grid(1, 1) }), invalid);
    assert_error(launched(LaunchConfig { shared_mem_bytes: 49153, ..grid(1, 1) }), invalid);
    launched(LaunchConfig { shared_mem_bytes: 49152, ..grid(1, 64) })?;
    Ok(())
}
