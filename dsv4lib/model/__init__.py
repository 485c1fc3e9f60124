"""DeepSeek-V4 whole on its layers: transformer, draft block, scheduler and caches, sampler, tokenizers, chat."""
