"""Run DeepSeek-V4 whole. Transformer, draft block, scheduler and caches, sampler, tokenizers, chat."""
