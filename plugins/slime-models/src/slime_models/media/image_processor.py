"""ImageProcessor: the image settings of a model folder: an image's number of tokens, and its pixels."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from slime_core.data.model_folder import read_model_config
from slime_core.errors import DataError, ModelError
from slime_core.types.image import Image

if TYPE_CHECKING:
    import PIL.Image

FILE: Final = "preprocessor_config.json"
ORIENTATION: Final = 0x0112
"""EXIF's tag of the side that is up."""


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """One image as a vision tower takes it, in the layout of the Qwen-VL family."""

    values: npt.NDArray[np.float32]
    """(patches, values of a patch)"""
    grid_thw: npt.NDArray[np.int64]
    """(3,) frames, rows and columns of patches; of a video, two frames are one."""
    num_tokens: int
    """Features that the language model gets of it."""

    @property
    def grids(self) -> npt.NDArray[np.int64]:
        """(frames, 3): frame after frame, as the language model sees them, with text between."""
        return np.repeat(self.grid_thw[None] * [0, 1, 1] + [1, 0, 0], self.grid_thw[0], axis=0)


class ImageProcessor:
    """transformers' image processor of a model folder, and the token that an image's features replace."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        """ModelError if the model takes no images, or its folder lacks the processor's config."""
        config = read_model_config(folder)
        token_id = config.get("image_token_id")
        if "vision_config" not in config or token_id is None:
            raise ModelError(
                f"{folder}: a model of type {config.get('model_type')} takes no images (config.json has no vision_config "
                "with an image_token_id). Use a model of the Qwen-VL family, or leave out --multimodal-keys."
            )
        if not (folder / FILE).is_file() and not (folder / "processor_config.json").is_file():
            raise ModelError(f"{folder}: no {FILE} in it, which defines how images become pixels. Copy it there.")
        if importlib.util.find_spec("PIL") is None:
            raise ModelError('images are decoded by Pillow, which is not installed: pip install "slime-rl[images]"')
        # The name that transformers exports asks for torchvision; without it, this one takes the processor made with PIL.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ModelError(f"{folder}: its image processor cannot be loaded: {error}") from error
        if not hasattr(self._processor, "merge_size") or not hasattr(self._processor, "get_number_of_image_patches"):
            raise ModelError(
                f"{folder}: {type(self._processor).__name__} does not cut images into patches as the Qwen-VL family does; "
                "other models with images are not supported."
            )
        self.token_id = int(token_id)
        self.video_token_id = int(config.get("video_token_id", -1))
        self._patches_of_token = int(self._processor.merge_size) ** 2

    def differs_from(self, videos: Any) -> list[str]:
        """In what transformers' processor of videos would make other numbers of a frame than this one."""
        names = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")
        return [name for name in names if getattr(self._processor, name) != getattr(videos, name)]

    def token_of(self, image: Image) -> int:
        """Id of the token that its features replace."""
        return self.video_token_id if image.frames else self.token_id

    def num_tokens(self, image: Image) -> int:
        """Number of tokens of an image from `read_image`, computed from its size."""
        width, height = opened(image).size
        if image.frames:
            return width * (height // 2) // (self._patches_of_token * int(self._processor.patch_size) ** 2)
        try:
            patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise DataError(f"{image.name}: an image of {width} x {height} pixels: {error}") from error
        return int(patches) // self._patches_of_token

    def pixels(self, image: Image) -> Pixels:
        if image.frames:
            return self._video_pixels(image)
        output = self._processor(images=[opened(image).convert("RGB")], return_tensors="np")
        grid = np.asarray(output["image_grid_thw"], np.int64)[0]
        return Pixels(
            values=np.asarray(output["pixel_values"], np.float32),
            grid_thw=grid,
            num_tokens=int(grid.prod()) // self._patches_of_token,
        )

    def resized(self, image: Image) -> bytes:
        """A file of the picture in the size that its pixels are computed from, RGB without loss: processors that differ in how
        they resize make equal pixels of it. The image's own file if it has this size already."""
        picture = opened(image)
        width, height = picture.size
        output = self._processor(
            images=[picture.convert("RGB")], do_rescale=False, do_normalize=False, return_tensors="np"
        )
        merge, side = int(self._processor.merge_size), int(self._processor.patch_size)
        _, rows, columns = (int(count) for count in np.asarray(output["image_grid_thw"])[0])
        if picture.mode == "RGB" and (rows * side, columns * side) == (height, width):
            return image.data
        values = np.asarray(output["pixel_values"]).reshape(
            rows // merge, columns // merge, merge, merge, 3, int(self._processor.temporal_patch_size), side, side
        )
        # One of the two equal moments: (rows, merge, side, columns, merge, side, channels).
        pixels = values[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * side, columns * side, 3)
        return png(np.rint(pixels).astype(np.uint8))

    def _video_pixels(self, video: Image) -> Pixels:
        """Pixels of two frames. Patches of one picture hold it twice; here the second half is the second frame's."""
        whole = opened(video).convert("RGB")
        width, height = whole.size[0], whole.size[1] // video.frames
        frames = [whole.crop((0, top, width, top + height)) for top in range(0, height * video.frames, height)]
        output = self._processor(images=frames, do_resize=False, return_tensors="np")
        depth = int(self._processor.temporal_patch_size)
        side = int(self._processor.patch_size)
        # (two frames, first or second, patches, channels, time, values)
        values = np.asarray(output["pixel_values"], np.float32).reshape(video.frames // 2, 2, -1, 3, depth, side * side)
        paired = np.stack([values[:, number, :, :, number] for number in range(2)], axis=3)
        grid = np.asarray(output["image_grid_thw"], np.int64)[0] * [0, 1, 1] + [video.frames // 2, 0, 0]
        return Pixels(
            values=paired.reshape(-1, 3 * depth * side * side),
            grid_thw=grid,
            num_tokens=int(grid.prod()) // self._patches_of_token,
        )


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """(rows, columns, RGB) as a file, uncompressed: compression takes longer than sending."""
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, format="PNG", compress_level=0)
    return file.getvalue()


def opened(image: Image) -> PIL.Image.Image:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(image.data))


def read_image(data: bytes, name: str) -> Image:
    """Decodes it once, so that its pixels can be computed later. An image with an EXIF rotation is turned upright here:
    engines and trainers would each do it differently. DataError if it is no image, or a damaged one."""
    import PIL.Image
    import PIL.ImageOps

    try:
        with PIL.Image.open(io.BytesIO(data)) as picture:
            picture.load()
            if picture.getexif().get(ORIENTATION, 1) != 1:
                upright = io.BytesIO()
                PIL.ImageOps.exif_transpose(picture).save(upright, format="PNG")
                data = upright.getvalue()
    except PIL.UnidentifiedImageError:
        raise DataError(f"{name}: {len(data)} bytes that are no image; they begin with {data[:12]!r}") from None
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        # A damaged PNG is a SyntaxError to Pillow.
        raise DataError(f"{name}: the image cannot be decoded: {error}") from error
    return Image(data=data, name=name)
