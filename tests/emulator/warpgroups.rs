//! Products of warpgroups, `wgmma`: what PTX says of them, and what a kernel may do wrong.

use anyhow::Result;
use half::f16;

use crate::gpu::{assert_error, child, compile, cudarc, grid, run, stream};
use cudarc::driver::sys::CUresult;

/// Elements of b, of a and of the product, in words of 32 bits.
const B: usize = 64 * 64 / 2;
const A: usize = 64 * 16 / 2;
const PRODUCT: usize = 64 * 64;

/// A warpgroup copies b (64, 64) to shared memory, packs of 16 bytes at the places that 128 bytes of swizzle give them, and
/// stores a (64, 16) there as columns 16 to 31 of another matrix. It multiplies a, PRODUCT, by 16 rows or columns of b.
fn source() -> String {
    let numbers = (0..32).map(|i| format!("%{i}")).collect::<Vec<_>>().join(", ");
    let registers = (0..32).map(|i| format!("\"+f\"(c[{i}])")).collect::<Vec<_>>().join(", ");
    format!(
        r#"extern "C" __global__ void __launch_bounds__(128) k(float *data, int length) {{
        __shared__ __align__(1024) unsigned char tile[8192], left_tile[8192];
        int thread = threadIdx.x, lane = thread % 32, group = lane / 4, in_group = lane % 4;
        for (int i = thread; i < 512; i += 128) {{
            int row = i / 8, pack = i % 8;
            unsigned to = __cvta_generic_to_shared(tile + row * 128 + (pack ^ row % 8) * 16);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                         : : "r"(to), "l"((const char *)data + i * 16), "r"(16) : "memory");
        }}
        for (int word = 0; word < 4; word++) {{
            int row = thread / 2, pack = thread % 2;
            unsigned char *to = left_tile + row * 128 + (2 + pack ^ row % 8) * 16;
            ((unsigned *)to)[word] = ((const unsigned *)data)[{B} + row * 8 + pack * 4 + word];
        }}
        asm volatile("cp.async.wait_all;" : : : "memory");
        asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
        __syncthreads();
        unsigned a[4];
        for (int i = 0; i < 4; i++) {{
            int row = thread / 32 * 16 + group + i % 2 * 8, word = in_group + i / 2 * 4;
            a[i] = ((const unsigned *)data)[{B} + row * 8 + word];
        }}
        float c[32];
        for (int i = 0; i < 32; i++) c[i] = i;
        unsigned long long rows = 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
        unsigned long long right = ((unsigned)__cvta_generic_to_shared(tile + START) & 0x3ffff) >> 4 | rows;
        unsigned long long left = ((unsigned)__cvta_generic_to_shared(left_tile + 32) & 0x3ffff) >> 4 | rows;
        asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{numbers}}}, PRODUCT;"
                     : {registers} : OPERANDS : "memory");
        asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
        MEANWHILE
        asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
        for (int i = 0; i < 32; i++) {{
            int row = thread / 32 * 16 + group + i / 2 % 2 * 8, column = i / 4 * 8 + in_group * 2 + i % 2;
            data[{B} + {A} + row * 64 + column] = c[i];
        }}
    }}"#
    )
}

/// The source with a in registers, for rows 16 and further of b, or for its columns.
fn correct(turned: bool) -> String {
    let (start, turned) = if turned { ("16 * 128", "1") } else { ("16 * 2", "0") };
    source()
        .replace("START", start)
        .replace("PRODUCT", &format!("{{%32, %33, %34, %35}}, %36, 1, 1, 1, {turned}"))
        .replace("OPERANDS", r#""r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right)"#)
}

/// The source with a in shared memory, for columns of b.
fn correct_shared() -> String {
    source()
        .replace("START", "16 * 2")
        .replace("PRODUCT", "%32, %33, 1, 1, 1, 0, 0")
        .replace("OPERANDS", r#""l"(left), "l"(right)"#)
}

/// Runs it on small integers, and returns a, b and the product.
fn product(source: &str) -> Result<[Vec<f32>; 3]> {
    let number = |i: usize| ((i * 37 + i / 7) % 23) as f32 - 11.0;
    let all: Vec<f32> = (0..2 * (A + B)).map(number).collect();
    let word = |pair: &[f32]| {
        let [low, high] = [0, 1].map(|i| u32::from(f16::from_f32(pair[i]).to_bits()));
        f32::from_bits(low | high << 16)
    };
    let mut words: Vec<f32> = all.chunks(2).map(word).collect();
    words.resize(B + A + PRODUCT, 0.0);
    let stream = stream()?;
    let mut data = stream.clone_htod(&words)?;
    run(&stream, &compile(&stream, source)?, grid(1, 128), &mut data)?;
    let product = stream.clone_dtoh(&data)?[B + A..].to_vec();
    Ok([all[2 * B..].to_vec(), all[..2 * B].to_vec(), product])
}

#[test]
fn a_warpgroup_multiplies_with_shared_memory_as_ptx_lays_it_out() -> Result<()> {
    let sources = [(correct(false), false), (correct(true), true), (correct_shared(), false)];
    for (source, turned) in sources {
        let [a, b, product] = product(&source.replace("MEANWHILE", ""))?;
        for row in 0..64 {
            for column in 0..64 {
                let right = |k: usize| if turned { (16 + k, column) } else { (column, 16 + k) };
                let of_b = |k| b[right(k).0 * 64 + right(k).1];
                let sum: f32 = (0..16).map(|k| a[row * 16 + k] * of_b(k)).sum();
                // What is in the register of this row and column at first: its number.
                let before = (column / 8 * 4 + row % 16 / 8 * 2 + column % 2) as f32;
                assert_eq!(product[row * 64 + column], before + sum, "{turned} {row} {column}");
            }
        }
    }
    Ok(())
}

/// In a process of its own, a change to a correct source fails, and the emulator says so.
fn fails(
    test: &str,
    source: String,
    [from, to]: [&str; 2],
    error: CUresult,
    message: &str,
) -> Result<()> {
    if let Some(text) = child(&format!("warpgroups::{test}"), &[]) {
        assert!(text.contains(message), "{text}");
        return Ok(());
    }
    assert!(source.contains(from), "{from}");
    let source = source.replacen(from, to, 1).replace("MEANWHILE", "");
    let stream = stream()?;
    let kernel = compile(&stream, &source)?;
    let mut data = stream.alloc_zeros::<f32>(B + A + PRODUCT)?;
    run(&stream, &kernel, grid(1, 128), &mut data).ok();
    assert_error(stream.synchronize(), error);
    std::mem::forget(data);
    Ok(())
}

macro_rules! mistakes {
    ($source:expr; $($test:ident: $from:expr => $to:expr, $error:ident, $message:expr;)*) => {$(
        #[test]
        fn $test() -> Result<()> {
            fails(stringify!($test), $source, [$from, $to], CUresult::$error, $message)
        }
    )*};
}

mistakes! {
    correct(true);
    registers_that_no_fence_orders:
        r#"asm volatile("wgmma.fence.sync.aligned;" : : : "memory");"# => "",
        CUDA_ERROR_LAUNCH_FAILED, "wgmma without a wgmma.fence";
    copies_that_tensor_cores_do_not_know_of:
        r#"asm volatile("fence.proxy.async.shared::cta;" : : : "memory");"# => "",
        CUDA_ERROR_LAUNCH_FAILED, "no fence.proxy.async followed it";
    copies_that_nobody_waits_for:
        r#"asm volatile("cp.async.wait_all;" : : : "memory");"# => "",
        CUDA_ERROR_LAUNCH_FAILED, "nobody has waited for it";
    copies_of_other_threads_without_a_barrier:
        "__syncthreads();" => "",
        CUDA_ERROR_LAUNCH_FAILED, "wgmma reads what cp.async has copied";
    shared_memory_that_is_written_too_soon:
        "MEANWHILE" => "tile[2048 + thread] ^= 1;",
        CUDA_ERROR_LAUNCH_FAILED, "was written before anybody waited";
    a_result_that_is_written_too_soon:
        "MEANWHILE" => "c[3] = 1;",
        CUDA_ERROR_LAUNCH_FAILED, "a result of a wgmma was written to";
    a_stride_beyond_shared_memory:
        "(1024ull >> 4)" => "(32768ull >> 4)",
        CUDA_ERROR_ILLEGAL_ADDRESS, "is not in shared memory";
    rows_without_swizzle:
        "| 1ull << 62" => "",
        CUDA_ERROR_LAUNCH_FAILED, "only 128 bytes of swizzle";
    a_descriptor_with_bits_that_mean_nothing:
        "1ull << 62" => "1ull << 62 | 1ull << 49",
        CUDA_ERROR_LAUNCH_FAILED, "has a base offset";
    a_descriptor_that_begins_within_eight_rows:
        "tile + 16 * 128" => "tile + 17 * 128",
        CUDA_ERROR_LAUNCH_FAILED, "begins within eight rows";
    one_descriptor_of_each_warp:
        "tile + 16 * 128" => "tile + thread / 32 * 1024",
        CUDA_ERROR_LAUNCH_FAILED, "begin different products";
    a_warp_that_never_begins:
        "unsigned a[4];" => "unsigned a[4]; if (thread >= 96) return;",
        CUDA_ERROR_LAUNCH_FAILED, "96 at products that their warpgroup has not begun";
}

mistakes! {
    correct_shared();
    stores_that_tensor_cores_do_not_know_of:
        r#"asm volatile("fence.proxy.async.shared::cta;" : : : "memory");"# => "",
        CUDA_ERROR_LAUNCH_FAILED, "wgmma reads what was stored to shared memory";
    stores_after_the_fence:
        "__syncthreads();" => "__syncthreads(); left_tile[thread / 2 * 128 + thread % 2 * 32 + 40] ^= 1; __syncthreads();",
        CUDA_ERROR_LAUNCH_FAILED, "wgmma reads what was stored to shared memory";
    a_left_matrix_that_is_written_too_soon:
        "MEANWHILE" => "if (thread < 64) left_tile[thread * 128 + 40] ^= 1;",
        CUDA_ERROR_LAUNCH_FAILED, "was written before anybody waited";
    a_left_matrix_beyond_shared_memory:
        "left_tile + 32" => "left_tile + 65536",
        CUDA_ERROR_ILLEGAL_ADDRESS, "of a is not in shared memory";
    a_left_matrix_without_swizzle:
        "__cvta_generic_to_shared(left_tile + 32) & 0x3ffff) >> 4 | rows" =>
        "__cvta_generic_to_shared(left_tile + 32) & 0x3ffff) >> 4 | 1ull << 38",
        CUDA_ERROR_LAUNCH_FAILED, "only 128 bytes of swizzle";
    a_left_matrix_that_begins_within_eight_rows:
        "left_tile + 32" => "left_tile + 160",
        CUDA_ERROR_LAUNCH_FAILED, "begins within eight rows";
    one_left_matrix_of_each_warp:
        "left_tile + 32" => "left_tile + 32 + thread / 32 * 1024",
        CUDA_ERROR_LAUNCH_FAILED, "begin different products";
}

/// Where nobody waits, there is no result.
#[test]
fn a_result_that_nobody_waits_for_is_garbage() -> Result<()> {
    let wait = r#"asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");"#;
    let source = correct(false).replace(wait, "").replace("MEANWHILE", "");
    let [_, _, product] = product(&source)?;
    assert!(product.iter().all(|x| x.is_nan()));
    Ok(())
}

/// A wrong start, stride or swizzle is a wrong result, if it stays within the tile.
#[test]
fn a_wrong_place_is_a_wrong_result() -> Result<()> {
    for turned in [false, true] {
        let source = correct(turned).replace("MEANWHILE", "");
        let [_, _, right] = product(&source)?;
        for (from, to) in [
            ("(1024ull >> 4)", "(128ull >> 4)"),
            ("tile + 16", "tile + 32"),
            ("(pack ^ row % 8)", "pack"),
            // The other way round, rows from the 16th on would be more than there are.
            if turned { ("(1024ull >> 4)", "(256ull >> 4)") } else { (", 0;", ", 1;") },
        ] {
            assert!(source.contains(from), "{from}");
            let [_, _, wrong] = product(&source.replacen(from, to, 1))?;
            assert_ne!(wrong, right, "{from}");
        }
    }
    let source = correct_shared().replace("MEANWHILE", "");
    let [_, _, right] = product(&source)?;
    for (from, to) in [("left_tile + 32", "left_tile"), ("(2 + pack ^ row % 8)", "(2 + pack)")] {
        assert!(source.contains(from), "{from}");
        let [_, _, wrong] = product(&source.replacen(from, to, 1))?;
        assert_ne!(wrong, right, "{from}");
    }
    Ok(())
}
