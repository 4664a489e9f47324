"""What a run tells about itself: where its time goes, its throughput, its use of the devices, and its end."""
