"""What the renderers of renderers.py are."""

from dataclasses import replace

import numpy as np

from slime_sources.rendering.prompt_renderer import PromptRenderer


class Plain(PromptRenderer):
    pass


class WideIds(PromptRenderer):
    def render(self, row, **given):
        prompt = super().render(row, **given)
        return replace(prompt, token_ids=prompt.token_ids.astype(np.int64))


class DropsLabels(PromptRenderer):
    def render(self, row, **given):
        return replace(super().render(row, **given), label=None)


class CountsRows(PromptRenderer):
    def render(self, row, **given):
        seen = self.__dict__.setdefault("seen", [])
        seen.append(row)
        prompt = super().render(row, **given)
        return replace(prompt, token_ids=np.append(prompt.token_ids, np.int32(len(seen))))


class FillsIn(PromptRenderer):
    def render(self, row, **given):
        return super().render({"question": "1", "answer": "1", **row}, **given)


class FillsTheContext(PromptRenderer):
    def accepts(self, prompt):
        return self._most is None or len(prompt.token_ids) <= self._most + (self.context_len is not None)
