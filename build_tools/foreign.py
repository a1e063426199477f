# SPDX-License-Identifier: Apache-2.0
"""What must not be in a row's object: instructions that its features do not cover, and symbols that others may have.

Flags keep a compiler to a row's features, and a ``target`` attribute, a pragma or assembly text gets past them: the
object is read back, and its registers, encodings and mnemonics are looked up here.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from .disassembly import Function

Rule = tuple[str, str, tuple[str, ...]]

_NO_ZMM = r"^(?!.*%zmm)"
_VECTORS = r"(?!\S*s[sdh] )"  # scalars reach masks and registers 16 to 31 with AVX512F alone

# Mnemonics (shell patterns), what the text must match, and the features of which one covers it. Encodings count:
# {vex} vpdpbusd is AVX-VNNI, the other one AVX512-VNNI. What a feature implies it covers, too (cpu.features.implied).
# tzcnt is not here: it is what compilers write for bsf where they know that it does no harm.
RULES: dict[str, tuple[Rule, ...]] = {
    "x86_64": (
        ("*", r"%zmm", ("avx512f",)),
        ("*", r"%k[0-7]|\{1to\d+\}", ("avx512f",)),
        ("vpternlog* vprol* vpror* vpermt2[dq] vpermt2p? vpermi2[dq] vpermi2p? vpsraq vpsravq vpabsq vpmaxsq vpmaxuq"
         " vpminsq vpminuq vmovdqa32 vmovdqa64 vmovdqu32 vmovdqu64 vrndscale* vgetexp* vgetmant* vfixupimm* vscalef*"
         " vrcp14* vrsqrt14* valignd valignq vcompressp? vexpandp? vpcompress[dq] vpexpand[dq] vblendmp? vpblendm[dq]"
         " vextract[fi]32x4 vextract[fi]64x4 vinsert[fi]32x4 vinsert[fi]64x4 vbroadcast[fi]32x4 vbroadcast[fi]64x4"
         " vcvt*2udq vcvt*2usi* vcvtudq2* vcvtusi2* vpmovqb vpmovqw vpmovqd vpmovdb vpmovdw vpmovus* vpmovsq? vpmovsd?"
         " vpscatter* vscatter* vptestm[dq] vptestnm[dq] vshuf[fi]32x4 vshuf[fi]64x2", "", ("avx512f",)),
        # Scalars and moves reach registers 16 to 31 with AVX512F alone, and so does what has a 512-bit operand.
        ("*", _NO_ZMM + r"(?!\S*s[sd] |vmov[dq] ).*%[xy]mm(1[6-9]|2\d|3[01])", ("avx512vl",)),
        ("*", _NO_ZMM + _VECTORS + r".*%[xy]mm.*\{%k", ("avx512vl",)),
        ("vpcmp* vcmp* vptestm* vptestnm*", _NO_ZMM + _VECTORS + r".*%[xy]mm\d+,%k", ("avx512vl",)),
        ("vpternlog* vprol* vpror* vpermt2* vpermi2* vpsraq vpsravq vpabsq vpmaxsq vpmaxuq vpminsq vpminuq vmovdqa32"
         " vmovdqa64 vmovdqu32 vmovdqu64 vpmullq vpconflict* vplzcnt* vpopcnt* vpmovm2?",
         _NO_ZMM, ("avx512vl",)),
        # gcc 12 writes these for plain 256-bit loads under -mavx512bw alone, and no CPU has AVX512BW without AVX512VL.
        ("vmovdqu8 vmovdqu16", _NO_ZMM, ("avx512vl", "avx512bw")),
        ("vpbroadcast?", _NO_ZMM + r"vpbroadcast. %[er]", ("avx512vl",)),
        ("vmovdqu8 vmovdqu16 kmov[dq] kand[dq] kandn[dq] kor[dq] kxor[dq] kxnor[dq] knot[dq] kortest[dq] ktest[dq]"
         " kadd[dq] kshift?[dq] kunpckwd kunpckdq vdbpsadbw vpermw vperm?2w vpmov?wb vpmovwb vpmovus?wb vpmovm2[bw]"
         " vpmov[bw]2m vpblendm[bw] vps??vw vptestm[bw] vptestnm[bw]", "", ("avx512bw",)),
        ("vpabs[bw] vpack* vpadd[bw] vpadds? vpaddus? vpalignr vpavg? vpbroadcast[bw] vpcmp*[bw] vpmadd* vpmax?[bw]"
         " vpmin?[bw] vpmovsxbw vpmovzxbw vpmulh* vpmullw vpsadbw vpshufb vpshufhw vpshuflw vps?ldq vpsllw vpsraw"
         " vpsrlw vpsub[bw] vpsubs? vpsubus? vpunpck?bw vpunpck?wd", r"^(?!vpmadd52).*(%zmm|%k[0-7])", ("avx512bw",)),
        ("vpmullq vcvt*2qq vcvt*2uqq vcvtqq2* vcvtuqq2* vrange* vreduce* vfpclass* vextract[fi]64x2 vextract[fi]32x8"
         " vinsert[fi]64x2 vinsert[fi]32x8 vbroadcast[fi]64x2 vbroadcast[fi]32x8 vbroadcast[fi]32x2 vpmovm2[dq]"
         " vpmov[dq]2m kmovb kandb kandnb korb kxorb kxnorb knotb kortestb ktest[bw] kadd[bw] kshift?b", "",
         ("avx512dq",)),
        ("vandp? vandnp? vorp? vxorp?", r"%zmm|\{%k", ("avx512dq",)),
        ("vpconflict* vplzcnt* vpbroadcastm*", "", ("avx512cd",)),
        ("vpermb vpermi2b vpermt2b vpmultishiftqb", "", ("avx512vbmi",)),
        ("vpcompress[bw] vpexpand[bw] vpshld* vpshrd*", "", ("avx512vbmi2",)),
        ("vpopcnt[bw] vpshufbitqmb", "", ("avx512bitalg",)),
        ("vpopcnt[dq]", "", ("avx512vpopcntdq",)),
        ("vp2intersect*", "", ("avx512vp2intersect",)),
        ("vdpbf16ps vcvtne2ps2bf16", "", ("avx512bf16",)),
        ("vcvtneps2bf16*", r"\{vex\}", ("avxneconvert",)),
        ("vcvtneps2bf16*", r"^(?!\{vex\})", ("avx512bf16",)),
        ("vbcstne* vcvtnee* vcvtneo*", "", ("avxneconvert",)),
        ("vaddph vaddsh vsubph vsubsh vmulph vmulsh vdivph vdivsh vsqrtph vsqrtsh vmaxph vmaxsh vminph vminsh vfm*ph"
         " vfm*sh vfnm*ph vfnm*sh vfc*ph vfc*sh vmovsh vmovw vcvt*2phx vcvtph2psx vcvtph2*w vcvt*w2ph vcvtph2*dq",
         "", ("avx512fp16",)),
        ("vpmadd52*", r"\{vex\}", ("avxifma",)),
        ("vpmadd52*", r"^(?!\{vex\})", ("avx512ifma",)),
        ("vpdpbusd* vpdpwssd*", r"\{vex\}", ("avxvnni",)),
        ("vpdpbusd* vpdpwssd*", r"^(?!\{vex\})", ("avx512vnni",)),
        ("vpdpbss* vpdpbsu* vpdpbuu*", "", ("avxvnniint8",)),
        ("vpdpwsu* vpdpwus* vpdpwuu*", "", ("avxvnniint16",)),
        ("tile* ldtilecfg sttilecfg", "", ("amx-tile",)),
        ("tdpbssd tdpbsud tdpbusd tdpbuud", "", ("amx-int8",)),
        ("tdpbf16ps", "", ("amx-bf16",)),
        ("tdpfp16ps", "", ("amx-fp16",)),
        ("tcmm*", "", ("amx-complex",)),
        ("tdpbf8ps tdphf8ps tdpbhf8ps tdphbf8ps", "", ("amx-fp8",)),
        ("tmmultf32ps", "", ("amx-tf32",)),
        ("vpadd* vpsub* vpmul* vpmadd* vpand* vpor vpxor vpack* vpunpck* vpcmp* vpshuf* vpsll* vpsrl* vpsra* vpmax*"
         " vpmin* vpabs* vpavg* vpsadbw vpsign? vphadd* vphsub* vpalignr vpblendw vpblendvb vpmovmskb vpmovsx*"
         " vpmovzx* vmpsadbw vmovntdqa", r"%ymm", ("avx2",)),
        ("vbroadcasti128 vinserti128 vextracti128 vperm2i128 vpermd vpermq vpermps vpermpd vpgather* vgather*"
         " vpmaskmov* vpsllv[dq] vpsrlv[dq] vpsravd vpblendd vpbroadcast?", "", ("avx2",)),
        ("vbroadcasts[sd]", r" %xmm", ("avx2",)),
        ("v*", r"%[xy]mm", ("avx",)),
        ("vzeroupper vzeroall vldmxcsr vstmxcsr", "", ("avx",)),
        ("vfmadd* vfmsub* vfnmadd* vfnmsub*", r"^(?!\S*[ps]h )", ("fma",)),
        ("vcvtph2ps vcvtps2ph", "", ("f16c",)),
        ("vaes*", r"%[yz]mm", ("vaes",)),
        ("aes* vaes*", "", ("aes",)),
        ("vpclmul*", r"%[yz]mm", ("vpclmulqdq",)),
        ("pclmul* vpclmul*", "", ("pclmul",)),
        ("gf2p8* vgf2p8*", "", ("gfni",)),
        ("sha1* sha256*", "", ("sha",)),
        ("mulx rorx sarx shlx shrx bzhi pdep pext", "", ("bmi2",)),
        ("andn bextr blsi blsmsk blsr", "", ("bmi",)),
        ("lzcnt*", "", ("lzcnt",)),
        ("popcnt*", "", ("popcnt",)),
        ("movbe*", "", ("movbe",)),
        ("adcx adox", "", ("adx",)),
        ("addsubp? haddp? hsubp? lddqu movddup movshdup movsldup", "", ("sse3",)),
        ("pshufb pabs? psign? pmaddubsw phadd* phsub* palignr pmulhrsw", "", ("ssse3",)),
        ("blendp? blendvp? pblend* dpp? insertps extractps mpsadbw packusdw pcmpeqq pextr[bdq] pinsr[bdq] phminposuw"
         " pmaxs[bd] pmaxu[wd] pmins[bd] pminu[wd] pmovsx* pmovzx* pmuldq pmulld ptest roundp? rounds? movntdqa", "",
         ("sse4.1",)),
        ("pcmpgtq pcmpestr? pcmpistr? crc32*", "", ("sse4.2",)),
    ),
    "aarch64": (
        ("sdot udot", r"\bv\d", ("dotprod",)),
        ("smmla ummla usmmla usdot sudot", "", ("i8mm",)),
        ("*", r"(^|[ {,])z\d+\.|[ ,]p\d+/[mz]", ("sve",)),
        ("fmlal* fmlsl*", "", ("fhm",)),
        ("bfdot bfmmla bfmlal* bfcvt*", "", ("bf16",)),
        ("fadd fsub fmul fdiv fmla fmls fmadd fmsub fmax fmin fmaxnm fminnm fabs fneg fsqrt fcmp fcmeq fcmgt fcmge"
         " scvtf ucvtf", r"\bv\d+\.[48]h|[ ,]h\d", ("fp16",)),
        ("fcadd fcmla", r"\bv\d", ("fcma",)),
        ("eor3 bcax rax1 xar", r"\bv\d", ("sha3",)),
        ("sha1* sha256*", "", ("sha2",)),
        ("aese aesd aesmc aesimc", "", ("aes",)),
    ),
}  # fmt: skip


@functools.cache
def fingerprint() -> str:
    """A digest of the rules: an object that passed others is read again."""
    return hashlib.sha256(repr(RULES).encode()).hexdigest()[:16]


def rules(arch: str, features: frozenset[str]) -> list[Rule]:
    """The rules for an object that may hold these features (and what they imply): none of them may match."""
    return [rule for rule in RULES.get(arch, ()) if not features.intersection(rule[2])]


def scan(functions: Mapping[str, Function], arch: str, features: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Instructions that the features do not cover: (instruction, features of which one would), first of each rule."""
    for names, having, needs in rules(arch, features):
        for function in functions.values():
            if function.count(names, having):
                found = next(i for i in function.instructions if Function("", arch, (i,)).count(names, having))
                yield found.text, " or ".join(needs)
                break


def shared_symbols(path: Path) -> list[str]:
    """Functions and variables that an ELF object defines for other objects to see; [] where it is no 64-bit ELF file.

    Two rows that define one name cannot be linked to one module, so only a row's own functions may be among them.
    """
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return []
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQII", data, offset + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, start, length, link, _ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for at in range(start, start + length, 24):
            name, info, _, section = struct.unpack_from("<IBBH", data, at)
            if info >> 4 == 1 and section != 0:  # STB_GLOBAL, and not undefined
                begin = names + name
                found.append(data[begin : data.index(b"\0", begin)].decode(errors="replace"))
    return found
