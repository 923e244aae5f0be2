"""The kernel's own tracker."""
