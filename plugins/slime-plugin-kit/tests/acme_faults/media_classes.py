"""What drivers of media make; imported when they are built."""

from dataclasses import replace
from itertools import count

import torch

from slime_core.errors import DataError
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.pack_images import PixelCache
from slime_models.media.qwen_vl import QwenVl
from slime_models.media.renderer import QwenVlRenderer

NUMBERS = count()


class Sight(QwenVl):
    Renderer = QwenVlRenderer
    Packer = PixelCache

    def renderer(self, folder, tokenizer, columns, *, trust_remote_code):
        (column,) = columns.values()
        return self.Renderer(tokenizer, ImageProcessor(folder), image_key=column)

    def packer(self, folder, *, trust_remote_code):
        return self.Packer(lambda: ImageProcessor(folder))


class ShiftsPlaces(Sight):
    class Renderer(QwenVlRenderer):
        def expand(self, token_ids, images, origin):
            token_ids, images = super().expand(token_ids, images, origin)
            return token_ids, tuple(replace(image, places=tuple(p + 1 for p in image.places)) for image in images)


class LeavesOneOut(Sight):
    class Packer(PixelCache):
        def pack(self, batch, samples):
            micro = super().pack(batch, samples)
            return micro and replace(micro, feature_of_token=torch.where(micro.feature_of_token == 0, -1, 0))


class Greets(Sight):
    class Renderer(QwenVlRenderer):
        def mark(self, text, images, origin):
            return f"0{text}"


class Renames(Sight):
    class Renderer(QwenVlRenderer):
        def read(self, row, origin, folder):
            return tuple(replace(image, name=f"{next(NUMBERS)}") for image in super().read(row, origin, folder))


class RaisesAsItComes(Sight):
    class Renderer(QwenVlRenderer):
        def read(self, row, origin, folder):
            try:
                return super().read(row, origin, folder)
            except DataError as error:
                raise ValueError(str(error)) from error
