"""Fine-tune the model of a Hugging Face folder, layer by layer.

    pip install ".[hf]"
    python examples/finetune_hf --checkpoint Qwen3-4B --text mine.txt --output mine
    python examples/finetune_hf --help

It trains all parameters and writes a folder of the same format. `--method lora` trains
adapters of frozen weights and writes them as PEFT does; `--merge` adds them to the
weights. `--method qlora` rounds these weights to four bits, and prints the loss with
them and with the folder's own. Moments are in host memory, in eight bits for weights of
16; `--way host` or `all` keeps weights there too. `--devices 8` divides all of it.

Ctrl-C and SIGTERM save a checkpoint, and `--resume` continues bit for bit.
"""
