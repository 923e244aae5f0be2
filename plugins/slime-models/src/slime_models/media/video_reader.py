"""VideoReader: videos to frames as the model requires them: which ones, of what size, and when they were."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from slime_core.data.model_folder import read_model_config
from slime_core.errors import DataError, ModelError
from slime_core.types.image import Image
from slime_models.media.image_processor import ImageProcessor, opened, read_image

if TYPE_CHECKING:
    import PIL.Image

FILES: Final = ("video_preprocessor_config.json", "processor_config.json")
TOGETHER: Final = 2
"""Frames that are one in the language model (temporal_patch_size)."""


class VideoReader:
    """Sampling and sizes by transformers' video processor of a model folder; files are decoded by PyAV.

    Frames are resized by PIL, as pictures are, and kept as one lossless picture: engines and trainers see the same pixels.
    """

    def __init__(self, folder: Path, images: ImageProcessor) -> None:
        """`images`: of the same folder; it computes the pixels of the frames. ModelError if the model takes no videos, or its
        folder lacks the processor's config."""
        config = read_model_config(folder)
        if config.get("model_type") != "qwen3_vl":
            raise ModelError(
                f"{folder}: videos of a model of type {config.get('model_type')} are not read, those of a qwen3_vl are. Leave "
                "out the key of videos in --multimodal-keys."
            )
        if not any((folder / name).is_file() for name in FILES):
            raise ModelError(f"{folder}: no {FILES[0]} in it, which defines how videos become frames. Copy it there.")
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        try:
            self._processor: Any = Qwen3VLVideoProcessor.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder}: its video processor cannot be loaded: {error}") from error
        if self._processor.temporal_patch_size != TOGETHER:
            raise ModelError(
                f"{folder}: a video processor with temporal_patch_size {self._processor.temporal_patch_size}; only "
                f"{TOGETHER} is computed."
            )
        if different := images.differs_from(self._processor):
            raise ModelError(
                f"{folder}: its processors of images and of videos differ in {', '.join(different)}; they must agree."
            )

    def read_file(self, data: bytes, name: str) -> Image:
        """Frames of a video file at the processor's rate. DataError if it cannot be decoded."""
        frames, fps, indices = self._decode(data, name)
        return self._image(frames, [index / fps for index in indices], name)

    def read_frames(self, frames: Sequence[bytes], name: str, fps: float | None = None) -> Image:
        """All of these pictures. `fps`: how many a second there were; None: as many as the processor takes of a file."""
        if not frames:
            raise DataError(f"{name}: a video without frames")
        pictures = [
            opened(read_image(frame, f"{name}, frame {number}")).convert("RGB") for number, frame in enumerate(frames)
        ]
        if len(sizes := {picture.size for picture in pictures}) > 1:
            raise DataError(f"{name}: its frames have several sizes: {sorted(sizes)}")
        rate = fps or float(self._processor.fps)
        return self._image(pictures, [number / rate for number in range(len(pictures))], name)

    def _decode(self, data: bytes, name: str) -> tuple[list[PIL.Image.Image], float, list[int]]:
        try:
            import av
        except ImportError:
            raise ModelError(
                'video files are decoded by PyAV, which is not installed: pip install "slime-rl[video]". Or give the '
                "frames of each video, as a list of pictures."
            ) from None
        import PIL.Image
        from transformers.video_utils import VideoMetadata

        try:
            with av.open(io.BytesIO(data), mode="r") as container:
                stream = next(iter(container.streams.video), None)
                if stream is None:
                    raise DataError(f"{name}: a file without a video in it")
                # The number of frames in the header is not always right.
                times = [packet.pts for packet in container.demux(stream) if packet.size]
                total, fps = len(times), float(stream.average_rate or 0)
                last = max((time for time in times if time is not None), default=0) * float(stream.time_base or 0)
                given = (container.duration or 0) / av.time_base
            if not total or not fps:
                raise DataError(f"{name}: a video of {total} frames at {fps:g} a second")
            if given - last > 1 + 2 / fps:
                raise DataError(
                    f"{name}: cut short: its header has {given:.1f} s, and its last frame is at {last:.1f} s"
                )
            metadata = VideoMetadata(total_num_frames=total, fps=fps)
            indices = [int(index) for index in self._processor.sample_frames(metadata)]
            requested, found = set(indices), {}
            with av.open(io.BytesIO(data), mode="r") as container:
                for number, frame in enumerate(container.decode(video=0)):
                    if number in requested:
                        found[number] = PIL.Image.fromarray(frame.to_ndarray(format="rgb24"))
        except av.FFmpegError as error:
            raise DataError(f"{name}: {len(data)} bytes that cannot be decoded as a video: {error}") from error
        if missing := sorted(requested - found.keys()):
            raise DataError(
                f"{name}: frame {missing[0]} of {total} cannot be decoded: the file is damaged or cut short"
            )
        return [found[index] for index in indices], fps, indices

    def _image(self, frames: Sequence[PIL.Image.Image], times: Sequence[float], name: str) -> Image:
        import PIL.Image
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        size, factor = self._processor.size, self._processor.patch_size * self._processor.merge_size
        width, height = frames[0].size
        try:
            height, width = smart_resize(
                num_frames=len(frames),
                height=height,
                width=width,
                temporal_factor=TOGETHER,
                factor=factor,
                min_pixels=size["shortest_edge"],
                max_pixels=size["longest_edge"],
            )
        except ValueError as error:
            raise DataError(f"{name}: a video of {width} x {height} pixels: {error}") from error
        # An odd last frame is used twice.
        shown = [*frames, *frames[-1:]] if len(frames) % TOGETHER else list(frames)
        moments = [*times, *times[-1:]] if len(times) % TOGETHER else list(times)
        whole = PIL.Image.new("RGB", (width, height * len(shown)))
        for number, frame in enumerate(shown):
            fitted = (
                frame if frame.size == (width, height) else frame.resize((width, height), PIL.Image.Resampling.BICUBIC)
            )
            whole.paste(fitted, (0, number * height))
        file = io.BytesIO()
        whole.save(file, format="PNG")
        pairs = np.array(moments).reshape(-1, TOGETHER)
        return Image(
            data=file.getvalue(),
            name=name,
            frames=len(shown),
            seconds=tuple(((pairs[:, 0] + pairs[:, 1]) / 2).tolist()),
        )
