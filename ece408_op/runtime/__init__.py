"""CUDA, LLVM, threads and memory, on which kernels run, and what several tools share. It knows no kernel and no MXNet.

cuda              the GPUs, compiling a kernel's text, launching it, streams
compile_ahead     all programs of a network, compiled together
nccl              sums and exchanges of arrays on several GPUs
occupancy         blocks that fit on a multiprocessor at a time
ptxas             what the compiler reports on kernels, in words
launch            a launch as integers: grids, blocks, arguments, constants, scratch memory
prepared_launch   launches whose arguments are built once
cached_folders    compiled programs in folders: made once, limited in bytes
bounded_dict      a dictionary of bounded size
copy_pipeline     copies between host and device that overlap with computing
pinned            pinned memory of others, which needs no staging buffer
host_cpu          the CPU that LLVM compiles for
llvm              machine code from LLVM IR
c_calls           hundreds of calls of a C function as one
thread_pool       threads that share the parts of one call
shared_memory     GPU memory that another process maps too
memory            aligned scratch memory, outputs with mapped pages
shared_libraries  the libraries of the nvidia-* wheels
install_hint      the pip command that installs an extra
source_text       comments, literals and headers of C++ and CUDA files
templates         Jinja's environment of the HTML pages
process_usage     time and memory of the process
"""
