// Memory of one thread that grows and is kept from call to call.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <new>

namespace VARIANT {

template <class T>
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }

    // At least `size` elements, aligned to a line of the cache. What was there before may be gone.
    T* reserve(size_t size) {
        if (size > size_) {
            constexpr size_t page = 4096;
            std::free(data_);
            data_ = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + page - 1) / page * page));
            if (!data_) throw std::bad_alloc();
            size_ = size;
        }
        return data_;
    }

  private:
    T* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace VARIANT
