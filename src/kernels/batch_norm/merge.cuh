// The moments of a channel's parts, (parts, channels, 3): how many, their mean and the sum of their
// squared distances from it. Merged by a warp: the mean, and the biased variance.
template <class A>
DEVICE void merge(const A *parts_of, size_t channel, size_t channels, size_t parts, double &mean, double &var) {
    const A *own = parts_of + channel * 3;
    double count = 0, sum = 0, squares = 0;
    for (size_t part = threadIdx.x % 32; part < parts; part += 32) {
        const A *from = own + part * channels * 3;
        count += from[0];
        sum += (double)from[0] * from[1];
    }
    count = warp_reduce<Sum>(count);
    mean = warp_reduce<Sum>(sum) / count;
    for (size_t part = threadIdx.x % 32; part < parts; part += 32) {
        const A *from = own + part * channels * 3;
        double distance = from[1] - mean;
        squares += from[2] + from[0] * distance * distance;
    }
    var = warp_reduce<Sum>(squares) / count;
}

