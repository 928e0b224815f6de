// Found only where the toolkit has no cuBLAS: for submissions that include its header and call nothing of it.
#ifndef ECE408_GRADE_FALLBACK_CUBLAS_H_
#define ECE408_GRADE_FALLBACK_CUBLAS_H_
typedef struct cublasContext* cublasHandle_t;
typedef int cublasStatus_t;
#endif
