// copy_async.cuh on the CPU: a copy takes place where its thread waits for it, as late as a GPU may execute it.
#pragma once
#include <deque>
#include <functional>

template <int N>
inline void read(float *to, const float *from) {
    if (N == 4) {
        const float4 v = *reinterpret_cast<const float4 *>(from);
        to[0] = v.x, to[N / 4] = v.y, to[N / 2] = v.z, to[3 * N / 4] = v.w;
    } else if (N == 2) {
        const float2 v = *reinterpret_cast<const float2 *>(from);
        to[0] = v.x, to[N / 2] = v.y;
    } else {
        to[0] = *from;
    }
}

template <int N>
inline void write(float *to, const float *from) {
    if (N == 4) *reinterpret_cast<float4 *>(to) = make_float4(from[0], from[N / 4], from[N / 2], from[3 * N / 4]);
    else if (N == 2) *reinterpret_cast<float2 *>(to) = make_float2(from[0], from[N / 2]);
    else *to = *from;
}

typedef std::vector<std::function<void()>> Copies;
static std::deque<Copies> committed_copies[1024];
static Copies open_copies[1024];  // by thread

template <int N>
UNWATCHED void copy_async(float *to, const float *from) {
    require_aligned(to, 4 * N), require_aligned(from, 4 * N);
    const races::Pause pause;
    open_copies[threadIdx.x].push_back([=] {
        for (int i = 0; i < N; i++) to[i] = from[i];
    });
}

UNWATCHED inline void commit_copies() {
    const races::Pause pause;
    committed_copies[threadIdx.x].push_back(std::move(open_copies[threadIdx.x]));
    open_copies[threadIdx.x].clear();
}

template <int N>
UNWATCHED void wait_for_copies() {
    for (auto &groups = committed_copies[threadIdx.x]; groups.size() > N; groups.pop_front())
        for (auto &copy : groups.front()) copy();
}
