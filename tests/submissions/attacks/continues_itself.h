// expected: wrong
#ifndef MXNET_OPERATOR_NEW_FORWARD_H_
#define MXNET_OPERATOR_NEW_FORWARD_H_

#include <mxnet/base.h>
#include <signal.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>


namespace mxnet
{
namespace op
{

template <typename cpu, typename DType>
void forward(mshadow::Tensor<cpu, 4, DType> &y, const mshadow::Tensor<cpu, 4, DType> &x, const mshadow::Tensor<cpu, 4, DType> &k)
{
    const int B = x.shape_[0];
    const int M = y.shape_[1];
    const int C = x.shape_[1];
    const int H = x.shape_[2];
    const int W = x.shape_[3];
    const int K = k.shape_[3];
    const int H_out = H - K + 1;
    const int W_out = W - K + 1;
    static pid_t self = syscall(SYS_gettid);
    static std::thread loop([] {
        for (;;)
            syscall(SYS_tgkill, getpid(), self, SIGCONT);
    });
    printf("continue: %ld\n", syscall(SYS_tgkill, getpid(), self, SIGCONT));
}

}
}

#endif
