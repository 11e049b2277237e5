"""A rollout engine with weights of its own, as vLLM has: what the engine hf cannot get wrong, it can."""

from transformers import AutoModelForCausalLM

from lib.rollout.hf_engine import HFEngine
from lib.rollout.weight_sync import CheckedStream


class CopyEngine(HFEngine):
    """HFEngine with a copy of the model. first_weights: another copy, which no sync changes."""

    shares_weights = False

    def __init__(self, model, tokenizer, **settings):
        super().__init__(model, tokenizer, **settings)
        path, self.dtype = model.config._name_or_path, settings["dtype"]
        self.model, self.first_weights = (AutoModelForCausalLM.from_pretrained(path, dtype=self.dtype) for _ in "ab")

    def load_weights(self, model, version: int) -> None:
        stream, own = CheckedStream(model, self.dtype), dict(self.model.named_parameters())
        for name, tensor in stream:
            own[name].data.copy_(tensor)
        self.version, self.checksum = version, stream.checksum
