"""The noise of `choose_tokens`, specified to the bit. Every implementation follows this text; the constants live here,
and once more in `kernels/native/src/choose.h` and `noise.cpp`.

All integers are 32-bit unsigned with wraparound (signed int32 does as well: only the shifts must be logical). Floats
are IEEE float32, rounded to nearest even after each operation: no fused multiply-add (Triton's
`enable_fp_fusion=False`, C++'s `-ffp-contract=off`), no library logarithm. So a draw is the same on every device, not
merely close.

    mix(x):      x ^= x >> 16;  x *= MIX_FIRST;  x ^= x >> 15;  x *= MIX_SECOND;  x ^= x >> 16
                 ("lowbias32" of C. Wellons' hash prospector: a bijection with low avalanche bias)
    key(start):  k = mix(start + seed_low);    k = mix(k ^ seed_high)
                 k = mix(k + position_low);    k = mix(k ^ position_high)
                 (seed and position are int64, split into their 32-bit halves)
    bits(token): x = mix(key(KEY_START_FIRST) + token * TOKEN_STEP);  x = mix(x ^ key(KEY_START_SECOND))
    r = bits >> 1                                        31 bits, so that it is a positive int32
    v = min((float(r) + 0.5) * 2**-31, 1 - 2**-24)       uniform in (0, 1)
    e = -log1p(-v)                                       exponential
    noise = -log(e)                                      Gumbel

The tail. Large noise comes from small v, where floats are dense: v >= 2**-32, so noise <= MAX_NOISE. What a true Gumbel
variable has beyond that is 2.3e-10 a token: 3.5e-5 for 151,936 tokens all 22 nats below the best. The clamp at the
other end cuts noise < -2.8, which 6e-8 of all draws would have.

The logarithms, from x > 0:

    split(x):     n = (x's bits >> 23) - 127;  m = x's mantissa bits under the exponent of 1.0, in [1, 2)
                  if m > SQRT2: m = m * 0.5, n = n + 1
    series(f, n): z = f * f;  p = Horner over LOG1P_COEFFICIENTS (p = p * f + c, from the last coefficient to the first)
                  y = (f * z) * p;  y = y + float(n) * LN2_LOW;  y = y - 0.5 * z
                  result = (f + y) + float(n) * LN2_HIGH
    log(x)      = series(m - 1, n) with m, n = split(x)
    log1p(-v)   = with m, n = split(1 - v): series(-v, 0) if n == 0 (1 - v has lost v's low bits), else series(m - 1, n)

The coefficients are a Chebyshev fit of (log1p(f) - f + f^2 / 2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1], rounded to
float32; evaluated as above the relative error of log1p there is below 8e-8.
"""

from __future__ import annotations

MIX_FIRST = 0x7FEB352D
MIX_SECOND = 0x846CA68B
KEY_START_FIRST = 0x9E3779B9
KEY_START_SECOND = 0x243F6A88
TOKEN_STEP = 0x9E3779B1

MAX_NOISE = 22.19  # the noise of r = 0 is 22.1807
MIN_NOISE = -2.82  # the noise of v = 1 - 2**-24 is -2.8118

SQRT2 = float.fromhex("0x1.6a09e6p+0")
LN2_HIGH = 0.693359375  # 9 significant bits: its product with an exponent is exact
LN2_LOW = float.fromhex("-0x1.bd0106p-13")  # ln 2 - LN2_HIGH
LOG1P_COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.555554p-2",
        "-0x1.fffff2p-3",
        "0x1.999d50p-3",
        "-0x1.555ed8p-3",
        "0x1.23d6b6p-3",
        "-0x1.fc5b4cp-4",
        "0x1.dda7cep-4",
        "-0x1.d9f4d6p-4",
        "0x1.24da9ap-4",
    )
)
