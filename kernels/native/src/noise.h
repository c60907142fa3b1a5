#pragma once
#include <cstdint>

// The noise of a token, given the specification's bits(token).
extern "C" float millrace_gumbel_noise(uint32_t bits);
