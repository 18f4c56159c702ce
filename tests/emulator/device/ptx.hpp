// Inline PTX: the compiler turns an `asm` into `emulated::ptx<instruction>({operands...})`, and what it does is read
// from its text, here. An instruction that is not in the table, or with other operands, does not compile.
#pragma once

namespace emulated {

enum class Ptx {
    f32_of_f16,
    f16_of_f32,
    bf16_of_f32,
    f16x2_of_f32,
    bf16x2_of_f32,
    exp2,
    load_matrices,
    load_turned_matrices,
    multiply_f16,
    multiply_bf16,
    multiply_tf32,
    tf32_of_f32,
    copy_16,
    copy_4,
    wait_for_copies,
    store_4,
    store_2,
    nothing,
    fence_writes,
    fence_registers,
    group_f16,
    group_turned_f16,
    group_bf16,
    group_turned_bf16,
    group_shared_f16,
    group_shared_bf16,
    commit_products,
    wait_for_products,
};

// An opcode, and its operands: a `%` for each number, without spaces.
struct Opcode {
    const char *name, *operands;
    Ptx what;
};

#define EMULATED_MMA "{%,%,%,%},{%,%,%,%},{%,%},{%,%,%,%};"
#define EMULATED_16 "%,%,%,%,%,%,%,%,%,%,%,%,%,%,%,%"
// scale-d, imm-scale-a, imm-scale-b and imm-trans-b are constants.
#define EMULATED_WGMMA(TYPE, TURNED, WHAT)                                                                             \
    {"wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE,                                                      \
     "{" EMULATED_16 "," EMULATED_16 "},{%,%,%,%},%,1,1,1," TURNED ";", WHAT},                                         \
        {"wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE,                                                 \
         "{" EMULATED_16 "," EMULATED_16 "," EMULATED_16 "," EMULATED_16 "},{%,%,%,%},%,1,1,1," TURNED ";", WHAT},
// a in shared memory; imm-trans-a, too, is a constant.
#define EMULATED_WGMMA_SHARED(TYPE, WHAT)                                                                              \
    {"wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE, "{" EMULATED_16 "," EMULATED_16 "},%,%,1,1,1,0,0;",  \
     WHAT},
constexpr Opcode OPCODES[] = {
    {"cvt.f32.f16", "%,%;", Ptx::f32_of_f16},
    {"cvt.rn.f16.f32", "%,%;", Ptx::f16_of_f32},
    {"cvt.rn.bf16.f32", "%,%;", Ptx::bf16_of_f32},
    {"cvt.rn.f16x2.f32", "%,%,%;", Ptx::f16x2_of_f32},
    {"cvt.rn.bf16x2.f32", "%,%,%;", Ptx::bf16x2_of_f32},
    {"ex2.approx.ftz.f32", "%,%;", Ptx::exp2},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "{%,%,%,%},[%];", Ptx::load_matrices},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "{%,%,%,%},[%];", Ptx::load_turned_matrices},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", EMULATED_MMA, Ptx::multiply_f16},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", EMULATED_MMA, Ptx::multiply_bf16},
    {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", EMULATED_MMA, Ptx::multiply_tf32},
    {"cvt.rna.tf32.f32", "%,%;", Ptx::tf32_of_f32},
    {"cp.async.cg.shared.global", "[%],[%],16,%;", Ptx::copy_16},
    {"cp.async.ca.shared.global", "[%],[%],4,%;", Ptx::copy_4},
    {"cp.async.wait_all", ";", Ptx::wait_for_copies},
    {"st.global.v4.u32", "[%],{%,%,%,%};", Ptx::store_4},
    {"st.global.v2.u32", "[%],{%,%};", Ptx::store_2},
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    {"fence.proxy.async.shared::cta", ";", Ptx::fence_writes},
    {"wgmma.fence.sync.aligned", ";", Ptx::fence_registers},
    EMULATED_WGMMA("f16", "0", Ptx::group_f16)
    EMULATED_WGMMA("f16", "1", Ptx::group_turned_f16)
    EMULATED_WGMMA("bf16", "0", Ptx::group_bf16)
    EMULATED_WGMMA("bf16", "1", Ptx::group_turned_bf16)
    EMULATED_WGMMA_SHARED("f16", Ptx::group_shared_f16)
    EMULATED_WGMMA_SHARED("bf16", Ptx::group_shared_bf16)
    {"wgmma.commit_group.sync.aligned", ";", Ptx::commit_products},
    {"wgmma.wait_group.sync.aligned", "0;", Ptx::wait_for_products},
#endif
};
#undef EMULATED_MMA
#undef EMULATED_16
#undef EMULATED_WGMMA
#undef EMULATED_WGMMA_SHARED

// What to do, and which operand of the `asm` each number in the text is.
struct Instruction {
    Ptx what;
    int count, at[72];
};

// Not a constant: a compiler that comes here says so.
inline Instruction ptx_that_is_not_emulated() { return {}; }

constexpr Instruction decode(const char *text) {
    if (!*text) // keeps a compiler from moving what its operands are
        return {Ptx::nothing, 0, {}};
    for (const Opcode &opcode : OPCODES) {
        const char *c = text;
        Instruction found{opcode.what, 0, {}};
        for (const char *name = opcode.name; c && *name; name++)
            c = *c == *name ? c + 1 : nullptr;
        if (!c || (*c != ' ' && *c != ';'))
            continue;
        for (const char *part = opcode.operands; c && *part; part++) {
            while (*c == ' ')
                c++;
            if (*c != *part) {
                c = nullptr;
                break;
            }
            c++;
            if (*part == '%') {
                int number = 0, digits = 0;
                for (; *c >= '0' && *c <= '9'; c++, digits++)
                    number = 10 * number + (*c - '0');
                if (!digits)
                    c = nullptr;
                found.at[found.count++] = number;
            }
        }
        if (c && !*c)
            return found;
    }
    return ptx_that_is_not_emulated();
}

// An operand of an `asm`: a value that is read, or a variable that is written.
struct Operand {
    unsigned long long bits;
    void *to;
};

// Whether a constraint's letter is for values of this type.
template <char Letter, class T> constexpr bool fits_constraint() {
    constexpr bool whole = std::is_integral_v<T> || std::is_pointer_v<T>;
    return Letter == 'f'   ? std::is_same_v<T, float>
           : Letter == 'd' ? std::is_same_v<T, double>
           : Letter == 'h' ? whole && sizeof(T) == 2
           : Letter == 'r' ? whole && sizeof(T) == 4
                           : Letter == 'l' && whole && sizeof(T) == 8;
}

template <char Letter, class T> Operand input(const T &value) {
    using Value = std::decay_t<T>;
    static_assert(fits_constraint<Letter, Value>(), "the constraint of an operand is for another type");
    return {bits_of<Value>(value), nullptr};
}

template <char Letter, class T> Operand output(T &value) {
    static_assert(fits_constraint<Letter, T>(), "the constraint of an operand is for another type");
    return {bits_of(value), &value};
}

template <class T> T aligned_pointer(unsigned long long address, unsigned bytes) {
    if (address % bytes)
        emulated_fail(MISALIGNED_ADDRESS, "PTX accesses %u bytes at %#llx", bytes, address);
    return reinterpret_cast<T>(address);
}

template <Ptx What, int N> void execute(const Instruction &instruction, Operand (&operands)[N]) {
    auto bits = [&](int i) { return operands[instruction.at[i]].bits; };
    auto number = [&](int i) { return from_bits<float>(bits(i)); };
    auto set = [&](int i, auto value) { memcpy(operands[instruction.at[i]].to, &value, sizeof value); };
    if constexpr (What == Ptx::f32_of_f16) {
        set(0, half_value(bits(1)));
    } else if constexpr (What == Ptx::f16_of_f32) {
        set(0, half_bits(number(1)));
    } else if constexpr (What == Ptx::bf16_of_f32) {
        set(0, bfloat_bits(number(1)));
    } else if constexpr (What == Ptx::f16x2_of_f32) { // the first goes into the upper half
        set(0, half_bits(number(2)) | unsigned(half_bits(number(1))) << 16);
    } else if constexpr (What == Ptx::bf16x2_of_f32) {
        set(0, bfloat_bits(number(2)) | unsigned(bfloat_bits(number(1))) << 16);
    } else if constexpr (What == Ptx::exp2) {
        constexpr float least = 1.17549435e-38f; // what is below is 0, before and after
        float x = number(1), y = exp2f(std::fabs(x) < least ? 0 : x);
        set(0, y < least ? 0.f : y);
    } else if constexpr (What == Ptx::load_matrices || What == Ptx::load_turned_matrices) {
        const int lane = emulated_lane(), g = lane / 4, t = lane % 4;
        Lanes rows = emulated_exchange(Warp::matrix, ~0u, reinterpret_cast<size_t>(emulated_shared_pointer(bits(4))));
        for (int i = 0; i < 4; i++) {
            auto row = [&](int r) { return aligned_pointer<const unsigned short *>(rows.value[i * 8 + r], 16); };
            set(i, What == Ptx::load_matrices ? row(g)[2 * t] | unsigned(row(g)[2 * t + 1]) << 16
                                              : row(2 * t)[g] | unsigned(row(2 * t + 1)[g]) << 16);
        }
    } else if constexpr (What == Ptx::multiply_f16 || What == Ptx::multiply_bf16 || What == Ptx::multiply_tf32) {
        WarpProduct product{{}, {}, {}, nullptr};
        if (What != Ptx::multiply_tf32)
            product.value = What == Ptx::multiply_f16 ? half_value : bfloat_value;
        for (int i = 0; i < 4; i++)
            product.left[i] = bits(4 + i), product.sums[i] = number(10 + i);
        for (int i = 0; i < 2; i++)
            product.right[i] = bits(8 + i);
        emulated_multiply(product);
        for (int i = 0; i < 4; i++)
            set(i, product.sums[i]);
    } else if constexpr (What == Ptx::tf32_of_f32) { // to nearest, ties away from zero
        unsigned x = bits(1);
        set(0, (x & 0x7fffffff) >= 0x7f800000 ? x : (x + 0x1000) & 0xffffe000);
    } else if constexpr (What == Ptx::copy_16 || What == Ptx::copy_4) {
        constexpr unsigned size = What == Ptx::copy_16 ? 16 : 4;
        if (bits(2) && bits(2) != size)
            emulated_fail(LAUNCH_FAILED, "cp.async of a part of its %u bytes is not emulated", size);
        auto to = aligned_pointer<void *>(reinterpret_cast<size_t>(emulated_shared_pointer(bits(0))), size);
        emulated_copy_async(to, aligned_pointer<const void *>(bits(1), size), size, bits(2) != 0);
    } else if constexpr (What == Ptx::wait_for_copies) {
        emulated_copies_arrived();
    } else if constexpr (What == Ptx::store_4) {
        *aligned_pointer<uint4 *>(bits(0), 16) = {unsigned(bits(1)), unsigned(bits(2)), unsigned(bits(3)),
                                                  unsigned(bits(4))};
    } else if constexpr (What == Ptx::store_2) {
        *aligned_pointer<uint2 *>(bits(0), 8) = {unsigned(bits(1)), unsigned(bits(2))};
    } else if constexpr (What == Ptx::fence_writes) {
        emulated_fence_writes();
    } else if constexpr (What == Ptx::fence_registers) {
        emulated_fence_registers();
    } else if constexpr (What == Ptx::group_f16 || What == Ptx::group_turned_f16 || What == Ptx::group_bf16 ||
                         What == Ptx::group_turned_bf16) {
        constexpr bool turned = What == Ptx::group_turned_f16 || What == Ptx::group_turned_bf16;
        constexpr bool is_f16 = What == Ptx::group_f16 || What == Ptx::group_turned_f16;
        const int own = instruction.count - 5; // numbers of d that a thread has
        GroupProduct product{bits(own + 4), 0, {}, 2 * own, turned, is_f16 ? half_value : bfloat_value, {}};
        for (int i = 0; i < 4; i++)
            product.left[i] = bits(own + i);
        for (int i = 0; i < own; i++)
            product.results[i] = static_cast<float *>(operands[instruction.at[i]].to);
        emulated_begin_product(product);
    } else if constexpr (What == Ptx::group_shared_f16 || What == Ptx::group_shared_bf16) {
        const int own = instruction.count - 2;
        auto value = What == Ptx::group_shared_f16 ? half_value : bfloat_value;
        GroupProduct product{bits(own + 1), bits(own), {}, 2 * own, false, value, {}};
        for (int i = 0; i < own; i++)
            product.results[i] = static_cast<float *>(operands[instruction.at[i]].to);
        emulated_begin_product(product);
    } else if constexpr (What == Ptx::commit_products) {
        emulated_commit_products();
    } else if constexpr (What == Ptx::wait_for_products) {
        emulated_wait_for_products(0);
    }
}

} // namespace emulated

inline size_t __cvta_generic_to_shared(const void *pointer) { return emulated::emulated_shared_address(pointer); }
inline size_t __cvta_generic_to_global(const void *pointer) { return reinterpret_cast<size_t>(pointer); }
