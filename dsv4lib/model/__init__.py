"""What surrounds the layers of DeepSeek-V4: sampling, verification of drafts, tokenizers and the chat encoding."""
