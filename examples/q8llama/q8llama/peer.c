// SPDX-License-Identifier: Apache-2.0
/*
 * llama.cpp or (with -DIK) ik_llama.cpp as q8llama.peers drives it: "prefill N", "decode N" and "tokens LENGTH" on
 * standard input, seconds or tokens on standard output.
 *
 *     peer MODEL THREADS CONTEXT
 */
#include <llama.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void quiet(enum ggml_log_level level, const char *text, void *unused)
{
    (void)unused;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    const int threads = atoi(argv[2]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model_params m = llama_model_default_params();
    struct llama_context_params c = llama_context_default_params();
    c.n_ctx = (uint32_t)atoi(argv[3]);
    c.n_batch = c.n_ubatch = 512;
    c.n_threads = c.n_threads_batch = (uint32_t)threads;
#ifdef IK
    m.repack_tensors = true;
    c.flash_attn = false; /* its library is built without */
    struct llama_model *const model = llama_model_load_from_file(argv[1], m);
    struct llama_context *const context = model != NULL ? llama_init_from_model(model, c) : NULL;
#else
    struct llama_model *const model = llama_model_load_from_file(argv[1], m);
    struct llama_context *const context = model != NULL ? llama_init_from_model(model, c) : NULL;
#endif
    if (context == NULL)
        return 1;
    char what[16];
    int count, position = 0;
    llama_token *const tokens = malloc(sizeof *tokens * c.n_ctx);
    for (uint32_t i = 0; i < c.n_ctx; i++)
        tokens[i] = (llama_token)(1000 + 37 * i % 40000);
    puts("ready");
    fflush(stdout);
    while (scanf("%15s %d", what, &count) == 2) {
        if (strcmp(what, "tokens") == 0) { /* a text of so many bytes follows the line */
            char *const text = malloc((size_t)count);
            getchar();
            if (fread(text, 1, (size_t)count, stdin) != (size_t)count)
                return 1;
            llama_token *const found = malloc(sizeof *found * (size_t)(count + 8));
#ifdef IK
            const int n = llama_tokenize(model, text, count, found, count + 8, false, false);
#else
            const int n = llama_tokenize(llama_model_get_vocab(model), text, count, found, count + 8, false, false);
#endif
            for (int i = 0; i < n; i++)
                printf("%d%c", found[i], i + 1 < n ? ' ' : '\n');
            if (n <= 0)
                putchar('\n');
            fflush(stdout);
            free(text);
            free(found);
            continue;
        }
        const double start = now();
        if (strcmp(what, "prefill") == 0) {
#ifdef IK
            llama_kv_cache_clear(context);
            if (llama_decode(context, llama_batch_get_one(tokens, count, 0, 0)) != 0)
                return 1;
#else
            llama_memory_clear(llama_get_memory(context), true);
            if (llama_decode(context, llama_batch_get_one(tokens, count)) != 0)
                return 1;
#endif
            position = count;
        } else {
            for (int i = 0; i < count; i++, position++) {
#ifdef IK
                if (llama_decode(context, llama_batch_get_one(tokens + i, 1, position, 0)) != 0)
                    return 1;
#else
                if (llama_decode(context, llama_batch_get_one(tokens + i, 1)) != 0)
                    return 1;
#endif
                llama_synchronize(context);
            }
        }
        llama_synchronize(context);
        printf("%.9f\n", now() - start);
        fflush(stdout);
    }
    return 0;
}
